"""Extras at the planner: runs of tokens that one step computes together, keys of blocks, and what workers cannot compute."""

from collections.abc import Sequence
from typing import Any

import pytest
from bench import LIFE, WORKER, Bench, limits, reference
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from meshlm.coordinator.prefix_index import chain_of
from meshlm.protocol.audio import Audio
from meshlm.protocol.edges.step import RowFailed, StepPlan
from meshlm.protocol.extra_kind import ExtraKind, Span
from meshlm.protocol.extras import Extras, key_parts
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.protocol.media import Media, MediaItem, Modality
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason
from meshlm.runtime.process.events import Received, Send
from meshlm.scheduler_proc.extras import end_between
from meshlm.scheduler_proc.request_table import SHARED_IMAGE


class Picture(ExtraKind, frozen=True):
    """A kind that nobody here knows: tokens that attend to one another."""

    places: tuple[Span, ...]

    @property
    def uncut(self) -> Sequence[Span]:
        return self.places


class StepsBench(Bench):
    """Notes which tokens of which row each step computes."""

    def take(self, sends: list[Send]) -> None:
        for send in sends:
            if isinstance(plan := send.message, StepPlan):
                counts = ints(plan.counts) or [1] * len(plan.rows)
                steps = zip(ints(plan.rows), ints(plan.starts), counts, strict=False)
                self.steps = [*getattr(self, "steps", []), *steps]
                assert plan.num_tokens <= self.limits.max_num_batched_tokens
        super().take(sends)

    def give(self, handle: int, prompt: list[int], *places: Span, max_tokens: int = 4) -> None:
        extras: Any = (Picture(places),) if places else ()
        self.assign(handle, prompt, max_tokens, extras=extras)

    def borders(self, row: int, length: int) -> set[int]:
        """The positions at which steps of a row's prompt end."""
        return {start + count for one, start, count in self.steps if one == row and start + count <= length}


PROMPT = [7 + n % 50 for n in range(60)]


@pytest.mark.parametrize("places", [((0, 20), (20, 20)), ((25, 20),), ((3, 9), (12, 30), (45, 15)), ((30, 30),)])
def test_a_run_is_computed_in_one_step(places: tuple[Span, ...]) -> None:
    bench = StepsBench(limits(), 32, 4)
    bench.give(1, PROMPT, *places)
    bench.finish()
    assert bench.tokens == {1: reference(PROMPT, 4)}
    assert all(not first < border < first + length for border in bench.borders(0, 60) for first, length in places)
    plain = StepsBench(limits(), 32, 4)
    plain.give(1, PROMPT)
    assert any(first < border < first + length for border in plain.borders(0, 60) for first, length in places)


def test_a_run_beside_decodes_waits_until_there_is_room_and_nobody_passes_it() -> None:
    bench = StepsBench(limits(max_num_seqs=8), 128, 4)
    for handle in range(6):
        bench.give(handle, [handle + 1], max_tokens=20)
    bench.step()
    bench.give(6, PROMPT, (2, 30))
    bench.give(7, [9, 9], max_tokens=3)
    begun = len(bench.steps)
    bench.finish()
    assert bench.tokens[6] == reference(PROMPT, 4)
    assert bench.ended == dict.fromkeys(range(8), FinishReason.LENGTH)
    assert not any(2 < border < 32 for border in bench.borders(6, 60))
    rows = [row for row, start, _ in bench.steps[begun:] if row in (6, 7) and start == 0]
    assert rows == [6, 7]


def test_a_run_that_no_step_holds_is_refused() -> None:
    bench = StepsBench(limits(), 32, 4)
    bench.give(1, PROMPT, (2, 33))
    assert bench.refused == {1: "prompt: 33 tokens of the prompt are computed together, and a step has room for 32"}
    bench.give(2, PROMPT, (2, 32))
    bench.finish()
    assert bench.tokens[2] == reference(PROMPT, 4)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), max_size=5), st.integers(0, 40), st.integers(1, 12))
def test_a_step_ends_inside_no_run_and_goes_on(gaps: list[tuple[int, int]], start: int, count: int) -> None:
    runs, at = [], 0
    for gap, length in gaps:
        runs.append((at + gap, length))
        at += gap + length
    found = end_between(runs, start, count, 12)
    assert 0 < found <= 12
    assert not any(first < start + found < first + length for first, length in runs)


VECTORS = PromptEmbeds("float32", ((2, 3), (70, 4)), bytes(range(28)))
GRAMMAR = Grammar(GrammarKind.COMPILED, "a")
PICTURE = MediaItem(Modality.IMAGE, b"d" * 32, pack_i32([5] * 70), b"\1" * 70, 30, is_uncut=True)
MEDIA = Media((PICTURE, MediaItem(Modality.IMAGE, b"e" * 32, pack_i32([5] * 20), b"\1" * 20, 150)))


@pytest.mark.parametrize("extras", [(VECTORS,), (Audio(b"abcd"),), (MEDIA,), (GRAMMAR, VECTORS)])
def test_the_coordinators_index_goes_by_the_same_keys(extras: Extras) -> None:
    ids = pack_i32([5] * 192)
    plain, keyed = chain_of(ids, "s"), chain_of(ids, "s", extras)
    assert chain_of(ids, "s", (GRAMMAR,)) == plain
    assert chain_of(ids, "s", extras) == keyed
    assert not set(plain) & set(keyed), "what is computed from other vectors or audio is another prefix"
    for begin, end in ((0, 64), (64, 128), (128, 192)):
        decides = any(extra.key_parts(begin, end) for extra in extras)
        assert bool(key_parts("", extras, begin, end)) == decides


def test_a_digest_stands_for_a_vector() -> None:
    """It is made once; keys, cuts and schedulers read no vectors."""
    made = VECTORS.with_digests()
    blind = PromptEmbeds("float32", made.spans, b"", digests=made.digests)
    for begin, end in ((0, 16), (3, 5), (64, 80), (16, 32)):
        assert VECTORS.key_parts(begin, end) == made.key_parts(begin, end) == blind.key_parts(begin, end)
        cut = made.cut(begin, end)
        assert (b"" if cut is None else cut.key_parts(0, end - begin)) == made.key_parts(begin, end)


def test_an_image_is_in_the_keys_of_its_own_blocks() -> None:
    others = Media((replace(PICTURE, digest=b"f" * 32), MEDIA.items[1]))
    moved = Media((replace(PICTURE, position=31), MEDIA.items[1]))
    assert MEDIA.key_parts(0, 16) == MEDIA.key_parts(16, 30) == MEDIA.key_parts(100, 150) == b""
    for begin, end in ((16, 32), (32, 48), (96, 112)):
        keys = {one.key_parts(begin, end) for one in (MEDIA, others, moved)}
        assert len(keys) == 3
        assert b"" not in keys
    assert MEDIA.key_parts(144, 160) == others.key_parts(144, 160) != b""
    assert MEDIA.uncut == ((30, 70),)


def test_a_cut_keeps_whole_images_alone() -> None:
    assert MEDIA.cut(0, 170) == MEDIA
    kept = MEDIA.cut(120, 180)
    assert kept is not None
    assert [item.position for item in kept.items] == [30]
    assert MEDIA.cut(0, 30) is MEDIA.cut(100, 150) is None
    with pytest.raises(ValueError, match="the cut at 40 to 100 goes through the image at 30"):
        MEDIA.cut(40, 170)


def test_nobody_finds_what_was_computed_without_an_image() -> None:
    """The text before it stays; who found the blocks already, as steps are planned ahead, ends too."""
    bench = Bench(limits(max_num_batched_tokens=128), 40, 8)
    media = Media((MediaItem(Modality.IMAGE, b"d" * 32, pack_i32([5] * 20), b"\1" * 20, 20),))
    prompt = [*range(7, 27), *[5] * 20, *range(7, 17)]
    bench.assign(0, [7, 8, 9], 1)
    bench.assign(1, prompt, 4, extras=(media,))
    bench.assign(2, prompt, 4, extras=(media,))
    bench.assign(3, prompt[:20] + [9] * 12, 4)
    while not (plan := bench.plans[0]).new_rows or plan.new_rows[0].num_prompt_tokens != len(prompt):
        bench.step()
    assert [ints(one.counts) for one in bench.plans] == [[50], [1, 2, 16]], "both find what the first one is to compute"
    failed = {0: RowFailed("the image cannot be encoded", ErrorKind.INTERNAL)}
    bench.event(Received(WORKER, LIFE, replace(bench.model.run(bench.plans.popleft()), failed=failed)))
    assert {handle: end for handle, end in bench.ended.items() if handle} == {
        1: FinishReason.ERROR,
        2: FinishReason.ERROR,
    }
    assert (bench.error_kinds[1], bench.error_kinds[2]) == (ErrorKind.INTERNAL, ErrorKind.OVERLOADED)
    assert (bench.refused[1], bench.refused[2]) == (": the image cannot be encoded", f": {SHARED_IMAGE}")
    bench.finish()
    bench.assign(4, prompt, 4, extras=(media,))
    bench.finish()
    assert bench.tokens[4] == reference(prompt, 4)
    assert (bench.cached[3], bench.cached[4]) == (16, 16), "of the text before the image"
