"""The scheduler and the fake device with several groups of layers: what a window no longer sees is freed, and nothing else."""

from typing import Any, Literal

import pytest
from bench import Bench, Model, limits
from fake_oracle import expected_token
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tiny_models import resolved_of, spec_of

from meshlm.protocol.config import CacheConfig, MeshConfig, WorkerConfig
from meshlm.protocol.edges.step import StepPlan, StepResult
from meshlm.protocol.kv import FullAttention, RecurrentState, SlidingWindow
from meshlm.protocol.layers import Attention, Layers, LayerSpec, StateSpec
from meshlm.protocol.model import ModelSpec
from meshlm.protocol.wire.ids import RequestId
from meshlm.scheduler_proc.limits import MAX_CRASHES
from meshlm.scheduler_proc.states import RequestState
from meshlm.workers.fake.engine import FakeEngine

VOCAB, CONTEXT, BLOCK, STEP = 1000, 128, 4, 32
LIMITS = limits(max_model_len=CONTEXT, max_num_seqs=4, max_num_batched_tokens=STEP)


class Device(Model):
    """A FakeEngine of so many pages."""

    def __init__(self, spec: ModelSpec, num_pages: int, drafts: int = 0, mode: Any = "auto", every: int = 1) -> None:
        self._made_of = spec, num_pages, drafts, mode, every
        layer_bytes = 4 * (spec.attention.numbers_kept if spec.attention is not None else spec.hidden_size)
        size = 1 if len(spec.layers.kinds) > 1 else spec.num_hidden_layers  # of a group
        resolved = resolved_of(spec, device="fake", max_model_len=CONTEXT, max_num_batched_tokens=STEP)
        block_size: Any = BLOCK  # smaller than a user can have it
        cache = CacheConfig(
            block_size=block_size,
            kv_cache_memory=num_pages * size * BLOCK * layer_bytes,
            mamba_cache_mode=mode,
            mamba_block_size=every * BLOCK,
        )
        config = MeshConfig(cache=cache, worker=WorkerConfig(fake_drafts=drafts), resolved=resolved)
        self.engine = FakeEngine(config, lambda *news: None)
        super().__init__(self.engine.facts.num_blocks, BLOCK, max_drafts=drafts)
        assert self.num_blocks == num_pages
        self.kv_specs = self.engine.facts.kv_specs

    def reset(self) -> None:
        self.engine.reset()

    def fresh(self) -> "Device":
        return Device(*self._made_of)

    def run(self, plan: StepPlan) -> StepResult:
        return self.engine.step(plan, 0).wait()


def two_kinds(window: int) -> ModelSpec:
    """One layer that sees all, two that slide."""
    return spec_of(
        vocab_size=VOCAB,
        num_hidden_layers=3,
        sliding_window=window,
        sliding_layers=(False, True, True),
        max_position_embeddings=CONTEXT,
    )


STATE = StateSpec(kind="mamba2", num_heads=2, head_dim=2, state_size=2)
ATTENTION = Attention(num_key_value_heads=1, head_dim=8)


def hybrid(window: int = 0) -> ModelSpec:
    """One layer with attention, two with a state; with `window` another one that slides."""
    layers = [LayerSpec(attention=ATTENTION), LayerSpec(state=STATE), LayerSpec(state=STATE)]
    if window:
        layers.append(LayerSpec(attention=replace(ATTENTION, sliding_window=window)))
    return spec_of(vocab_size=VOCAB, max_position_embeddings=CONTEXT, layers=Layers.from_records(layers))


def only_states() -> ModelSpec:
    layers = Layers.alike(LayerSpec(state=STATE), 2)
    return spec_of(vocab_size=VOCAB, max_position_embeddings=CONTEXT, layers=layers)


def generated(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(expected_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def test_a_model_with_both_kinds_has_groups_of_both() -> None:
    assert Device(two_kinds(6), 200).kv_specs == (FullAttention(), SlidingWindow(6), SlidingWindow(6))
    one = spec_of(vocab_size=VOCAB, num_hidden_layers=3, sliding_window=6, max_position_embeddings=CONTEXT)
    only = Device(one, 200)
    assert only.kv_specs == (SlidingWindow(6),)


def test_a_request_decodes_in_less_than_its_layers_would_keep() -> None:
    device = Device(two_kinds(6), 60)
    bench = Bench(LIMITS, 0, 0, model=device)
    bench.assign(1, [7] * 30, 98)
    while bench.plans:
        bench.step()
    assert bench.core.batching.num_preemptions == 0
    assert bench.tokens[1] == generated([7] * 30, 98), "its 128 tokens in all groups would be 96 pages"
    bench.finish()


def test_nobody_waits_or_is_preempted_for_blocks_that_no_one_sees() -> None:
    """Two requests keep 7 blocks of 3 pages each, of which no token sees 10 pages; the third needs 18 pages where 16 are free."""
    device = Device(two_kinds(6), 58)
    bench = Bench(LIMITS, 0, 0, model=device)
    pool = bench.core.batching.kv.pool
    for handle in (1, 2):
        bench.assign(handle, [handle] * 6, 50)
    while pool.num_free > 16:
        bench.step()
    assert pool.num_free == 16
    bench.assign(3, [3] * 24, 8)
    for _ in range(2):
        bench.step()
    assert bench.core.requests[RequestId("r3")].state is RequestState.RUNNING, "it waits for blocks that others keep"
    while bench.plans:
        bench.step()
    assert bench.core.batching.num_preemptions == 0
    assert bench.tokens == {1: generated([1] * 6, 50), 2: generated([2] * 6, 50), 3: generated([3] * 24, 8)}
    bench.finish()


@pytest.mark.parametrize("num_pages", range(56, 72))
def test_blocks_that_a_prompt_sees_in_this_step_are_nobody_elses(num_pages: int) -> None:
    """The last chunk of a prompt sees more than the tokens behind it, and the rest of its step is for whom memory is short."""
    device = Device(two_kinds(6), num_pages)
    bench = Bench(LIMITS, 0, 0, model=device)
    prompts = {1: [1] * 8, 2: list(range(104)), 3: list(range(50, 78))}
    for handle, prompt in prompts.items():
        bench.assign(handle, prompt, 12)
    bench.finish()
    assert {one: bench.tokens[one] for one in prompts} == {one: generated(prompts[one], 12) for one in prompts}


@pytest.mark.parametrize("drafts", [0, 3])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_requests(drafts: int, data: st.DataObject) -> None:
    """Shared prefixes, little memory, chunks, preemption, a worker or scheduler lost: each token comes from the right KV."""
    draw = data.draw
    spec = two_kinds(draw(st.integers(2, 30)))
    run_any(draw, Device(spec, draw(st.integers(100, 140)), drafts))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_requests_with_states(mode: Literal["none", "align", "all"], drafts: int, data: st.DataObject) -> None:
    """The same with states, which are read before a step writes any, and go on from checkpoints, of known tokens alone."""
    draw = data.draw
    every = draw(st.integers(1, 3))
    if draw(st.integers(0, 3)) == 0:
        device = Device(only_states(), draw(st.integers(40, 60)), drafts, mode, every)
    else:
        device = Device(hybrid(draw(st.sampled_from([0, 7]))), draw(st.integers(110, 140)), drafts, mode, every)
    wanted = RecurrentState(mode) if mode == "none" else RecurrentState(mode, every)
    assert wanted in device.kv_specs
    run_any(draw, device)


def run_any(draw: Any, device: Device) -> None:
    bench = Bench(LIMITS, 0, 0, model=device)
    asked: dict[int, tuple[list[int], int]] = {}
    num_lost = 0
    for handle in range(draw(st.integers(1, 6))):
        prompt = list(range(draw(st.integers(0, 60)))) + draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
        asked[handle] = (prompt, draw(st.integers(1, CONTEXT - len(prompt))))
        bench.assign(handle, *asked[handle])
        for _ in range(draw(st.integers(0, 30))):
            if bench.plans:
                bench.step()
        if num_lost + 1 < MAX_CRASHES and draw(st.integers(0, 9)) == 0:  # a request under so many deaths is given up
            bench.lose_worker()
            num_lost += 1
    bench.finish()
    assert {one: bench.tokens[one] for one in asked} == {one: generated(*asked[one]) for one in asked}
