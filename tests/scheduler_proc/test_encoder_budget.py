"""Images in steps: encoders make no more vectors in one than its budget, texts pass those who wait for it, and all are computed."""

from array import array
from collections import OrderedDict

import pytest
from bench import Bench, limits, reference
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.extras import find_extra
from meshlm.protocol.media import CACHED_STEPS, Media, MediaItem, Modality
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.scheduler_proc.limits import Limits

VECTOR = 5  # the token whose place one takes
TEXT = [7, 8, 9]


def image(name: int, num_vectors: int, position: int, *, is_uncut: bool = False) -> MediaItem:
    """With a token that begins it, and one that ends it."""
    replacement = pack_i32([3, *[VECTOR] * num_vectors, 4])
    is_vector = b"\0" + b"\1" * num_vectors + b"\0"
    return MediaItem(
        Modality.IMAGE, bytes([name]).ljust(32), replacement, is_vector, position=position, is_uncut=is_uncut
    )


class EncoderBench(Bench):
    """Its worker encodes what a step needs and its cache does not have."""

    def __init__(self, limits: Limits, num_blocks: int, block_size: int) -> None:
        self.encoded: list[list[int]] = []  # vectors of each item, by step
        self._cached: OrderedDict[bytes, int] = OrderedDict()
        self._items: dict[int, tuple[MediaItem, ...]] = {}  # by row
        super().__init__(limits, num_blocks, block_size)

    def step(self) -> None:
        self._encode(self.plans[0])
        super().step()

    def lose_worker(self) -> None:
        self._cached.clear()
        super().lose_worker()

    def _encode(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            media = find_extra(new.extras, Media)
            self._items[new.row] = () if media is None else media.items
        counts = ints(plan.counts) or [1] * len(ints(plan.rows))
        needed = {
            item.digest: item.num_vectors
            for row, start, count in zip(ints(plan.rows), ints(plan.starts), counts, strict=True)
            for item in self._items[row]
            if item.position + 1 < start + count and item.position + 1 + item.num_vectors > start
        }
        missing = {digest: number for digest, number in needed.items() if digest not in self._cached}
        for digest in needed.keys() - missing.keys():
            self._cached.move_to_end(digest)
        for digest, number in missing.items():
            while sum(self._cached.values()) + number > CACHED_STEPS * self.limits.max_num_batched_tokens:
                self._cached.popitem(last=False)
            self._cached[digest] = number
        self.encoded.append(list(missing.values()))

    def give(self, handle: int, *parts: int | tuple[int, int], max_tokens: int = 3, is_uncut: bool = False) -> None:
        """A prompt of texts, of so many tokens, and images: a name and its vectors."""
        prompt, items = list[int](), list[MediaItem]()
        for part in parts:
            if isinstance(part, int):
                prompt += [10 + handle + at for at in range(part)]
                continue
            items.append(image(*part, len(prompt), is_uncut=is_uncut))
            prompt += array("i", items[-1].replacement)
        prompt.append(6)
        self.prompts = getattr(self, "prompts", {}) | {handle: (prompt, max_tokens)}
        self.assign(handle, prompt, max_tokens, extras=(Media(tuple(items)),) if items else ())

    def runs(self, handle: int) -> bool:
        return any(request.handle == handle for request in self.core.batching.running)


PART = st.one_of(st.integers(1, 9), st.tuples(st.integers(0, 9), st.integers(0, 1)))
SIZES = (4, 20)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(PART, min_size=1, max_size=5)), min_size=1, max_size=12),
    st.booleans(),
    st.sampled_from([0, 8, 24]),
    st.booleans(),
)
def test_any_requests(
    asked: list[tuple[int, list[int | tuple[int, int]]]], chunked: bool, budget: int, cut: bool
) -> None:
    most = limits(chunked_prefill=chunked, max_num_encoder_input_tokens=budget, max_num_batched_tokens=64)
    bench = EncoderBench(most, 64, 4)
    for handle, (steps, parts) in enumerate(asked):
        sized = [part if isinstance(part, int) else (part[0] + 10 * part[1], SIZES[part[1]]) for part in parts[:3]]
        bench.give(handle, *sized, is_uncut=not cut)
        for _ in range(min(steps, len(bench.plans))):
            bench.step()
    bench.finish()
    for handle, (prompt, max_tokens) in bench.prompts.items():
        assert bench.tokens[handle] == reference(prompt, max_tokens)
    if chunked:
        for vectors in bench.encoded:
            assert len(vectors) <= 1 or sum(vectors) <= (budget or 64), vectors


def test_texts_pass_images_that_wait_for_the_budget() -> None:
    bench = EncoderBench(limits(max_num_encoder_input_tokens=10, max_num_batched_tokens=64), 200, 4)
    bench.give(0, 3, max_tokens=2)
    for handle in range(1, 6):
        bench.give(handle, (handle, 10), max_tokens=2)
    bench.give(6, 3, max_tokens=2)
    bench.step()
    assert bench.runs(6), "it waits for one step, and not for five images"
    bench.finish()
    assert sorted(map(sum, bench.encoded))[-5:] == [10] * 5, "a step has one of them"


def test_images_go_in_the_order_of_their_requests() -> None:
    """A small one takes not what is left of a budget that a large one waits for."""
    bench = EncoderBench(limits(max_num_encoder_input_tokens=10, max_num_batched_tokens=64), 200, 4)
    for handle, size in enumerate((6, 8, 2, 2)):
        bench.give(handle, (handle, size), max_tokens=9)
    begun = []
    while bench.plans:
        bench.step()
        begun += [handle for handle in range(4) if bench.runs(handle) and handle not in begun]
    assert begun == [0, 1, 2, 3]
    assert [vectors for vectors in bench.encoded if vectors] == [[6], [8, 2], [2]]


@pytest.mark.parametrize("is_uncut", [False, True])
def test_one_request_with_many_images_is_spread_over_steps(is_uncut: bool) -> None:
    bench = EncoderBench(limits(max_num_encoder_input_tokens=10, max_num_batched_tokens=64), 200, 4)
    bench.give(0, 3, max_tokens=20)
    bench.give(1, 2, *[(name, 8) for name in range(6)], is_uncut=is_uncut)
    bench.finish()
    assert [vectors for vectors in bench.encoded if vectors] == [[8]] * 6
    assert bench.tokens[1] == reference(bench.prompts[1][0], 3)


def test_what_is_encoded_already_costs_nothing() -> None:
    bench = EncoderBench(
        limits(max_num_encoder_input_tokens=10, max_num_batched_tokens=64, prefix_caching=False), 200, 4
    )
    bench.give(0, (1, 10))
    bench.finish()
    for handle in (1, 2, 3):
        bench.give(handle, 1 + handle, (1, 10))
    bench.step()
    assert all(bench.runs(handle) for handle in (1, 2, 3))
    bench.finish()
    assert [vectors for vectors in bench.encoded if vectors] == [[10]]


def test_another_worker_has_encoded_nothing() -> None:
    bench = EncoderBench(limits(max_num_encoder_input_tokens=10, max_num_batched_tokens=64), 200, 4)
    for handle in range(3):
        bench.give(handle, (handle, 10), max_tokens=30)
    while len([vectors for vectors in bench.encoded if vectors]) < 3:
        bench.step()
    bench.encoded.clear()
    bench.lose_worker()
    bench.finish()
    assert [vectors for vectors in bench.encoded if vectors] == [[10]] * 3


def test_steps_with_streams_encode_no_more_than_their_prompts_may_take() -> None:
    bench = EncoderBench(limits(max_num_batched_tokens=512, max_model_len=1024), 800, 4)
    bench.give(0, 3, max_tokens=100)
    bench.step()
    bench.core.batching.budget.prompt_s = 1.0  # slow: a step beside streams has 256 tokens of prompts
    for handle in range(1, 6):
        bench.give(handle, (handle, 120), max_tokens=2)
    for _ in range(12):
        bench.step()
    assert max(map(sum, bench.encoded)) == 240
