"""Models with recurrent states verify drafts: tokens, log-probabilities and checkpoints are those of plain steps, by bits."""

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from cpu_steps import LENGTH, PROMPTS
from drafted_steps import Scripted, Text, add, begun, decode, plain
from hybrid_cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from served_engines import AGAIN, Engines, Reference, served
from served_engines import PROMPTS as SERVED
from served_engines import made as written

from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.protocol.layers import StateSpec
from meshlm.protocol.sampling import SamplingParams
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers import memory
from meshlm.workers.batch import RequestLens, StepInputs
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine
from meshlm.workers.kv.layout import StateLayout
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.speculative import drafters
from meshlm.workers.speculative.drafter import Drafts
from meshlm.workers.states.torch_states import TorchStates

TOKENS, MOST = 30, 5
ROUNDING = 2e-4  # what torch makes of a row hangs on how many there are in a step
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.0, seed=7, top_k=40, logprobs=1),
    SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.3, logprobs=3),
]


@pytest.fixture(params=CASES, scope="module")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModelEngine, Scripted]]:
    """An engine with a scripted drafter."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    written(CASES[request.param], folder)
    values: dict[str, object] = {"model": str(folder), "device": "cpu", "dtype": "float32", "cpu_threads": 1}
    values |= {"max_model_len": LENGTH, "max_num_seqs": 4, "mamba_cache_mode": "all"}
    grad, threads, scripted = torch.is_grad_enabled(), torch.get_num_threads(), Scripted()
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=MOST)
    config = msgspec.structs.replace(resolve.resolve(flags.build(values, None)), speculative=drafts)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(drafters, "drafter_of", lambda made: scripted)
        found = make_engine(config, lambda *progress: None)
    scripted.tokens = found.rows.tokens.numpy()
    yield found, scripted
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)


def checkpoints(made: ModelEngine, texts: list[Text]) -> list[torch.Tensor]:
    """The states behind the full blocks of each row, of which each has a page of its own."""
    size, found = made.rows.block_size, []
    for cache in made.compute.caches:
        if (state := cache.state) is not None:
            for row, text in enumerate(texts):
                computed = len(PROMPTS[row]) + len(text.tokens) - 1
                pages = made.rows.block_tables[state.group][row, : computed // size].tolist()
                found += [state.ssm[:, pages].clone(), state.conv[:, pages].clone()]
    return found


def test_any_drafts_give_the_text_and_the_checkpoints_of_plain_steps(case: tuple[ModelEngine, Scripted]) -> None:
    made, scripted = case
    expected = plain(made, PARAMS, TOKENS)
    longer = plain(made, PARAMS, TOKENS + MOST + 1)
    scripted.texts = {row: prompt + text.tokens for row, (prompt, text) in enumerate(zip(PROMPTS, longer, strict=True))}
    plain(made, PARAMS, TOKENS)
    states = checkpoints(made, expected)
    if made.rows.block_size <= len(PROMPTS[-1]) + TOKENS:
        assert any(each.numel() for each in states), "blocks end among these tokens"

    @settings(max_examples=6)
    @given(
        st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST + 2)), min_size=1, max_size=8),
        st.lists(st.integers(0, MOST), min_size=1, max_size=5),
        st.lists(st.permutations([0, 1, 2]), min_size=1, max_size=3),
    )
    def holds(script: list[tuple[int, int]], allowed: list[int], orders: list[list[int]]) -> None:
        for cache in made.compute.caches:  # what an earlier example left proves nothing
            for tensor in cache.tensors():
                tensor.fill_(torch.nan)
        scripted.script = (entry for _ in repeat(0) for entry in script)
        texts, nth = begun(made, PARAMS), 0
        while min(len(text.tokens) for text in texts) < TOKENS:
            rows = [row for row in orders[nth % len(orders)] if len(texts[row].tokens) < TOKENS]
            most = [min(allowed[(nth + row) % len(allowed)], TOKENS - 1 - len(texts[row].tokens)) for row in rows]
            add(texts, decode(made, rows, [max(0, one) for one in most]), rows)
            nth += 1
        for text, wanted in zip(texts, expected, strict=True):
            assert text.tokens == wanted.tokens
            for found, plainly in zip(text.logprobs, wanted.logprobs, strict=True):
                assert found.ranks == plainly.ranks
                both = [np.frombuffer(each.top_logprobs, np.float32) for each in (found, plainly)]
                np.testing.assert_allclose(both[0], both[1], atol=ROUNDING)
        for state, left in zip(checkpoints(made, texts), states, strict=True):
            np.testing.assert_allclose(state.numpy(), left.numpy(), atol=ROUNDING)

    holds()


def test_states_of_drafts_have_a_share_of_the_memory(case: tuple[ModelEngine, Scripted]) -> None:
    """Those of all requests, in an eighth of it; those of one request at least."""
    made, _ = case
    layout, config = made.layout, made.config
    groups, each = len(layout.state_groups), 1 + MOST
    for pages in (8 * 4 * each * groups, 8 * 2 * each * groups, each * groups):
        lines = memory.draft_lines(config, pages * layout.page_bytes, layout)
        assert lines == max(each, pages // 8 // groups)
    assert memory.draft_lines(config, 1 << 40, layout) == 4 * each, "no more than all rows may have"
    none = msgspec.structs.replace(config, speculative=SpeculativeConfig())
    enough = 1000 * layout.page_bytes
    assert memory.num_pages(config, enough + 4 * each * groups * layout.page_bytes, layout) == memory.num_pages(
        none, enough, layout
    )
    assert made.facts.max_draft_lines == 4 * each


TOKENS_OF = 3  # of each request, in the test of bits
KINDS: dict[str, StateSpec] = {
    "mamba2": StateSpec(kind="mamba2", num_heads=32, head_dim=4, state_size=32, n_groups=2),
    "gated delta net": StateSpec(kind="gated_delta_net", num_heads=32, head_dim=32, state_size=32, conv_bias=False),
    "mamba": StateSpec(kind="mamba", num_heads=64, head_dim=1, state_size=32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_leave_the_states_of_decodes_by_bits(kind: str) -> None:
    """Three requests with two drafts each, and the same tokens as three steps of decodes. Sizes are such that torch computes every
    number of a row in the same way, however many rows there are."""
    pytest.importorskip("triton")
    from meshlm.workers.states.self_test import RandomMixer

    torch.manual_seed(0)
    layer, num, size = RandomMixer(KINDS[kind], torch.float32, torch.device("cpu")), 3, 16
    tokens = torch.randn(num * TOKENS_OF, layer.width)
    layout = StateLayout(KINDS[kind], torch.float32, torch.float32)
    held = torch.randn(2, 8 + num * TOKENS_OF, layout.half_bytes // 4).view(torch.uint8)
    starts = torch.tensor([7, 15, 22])  # the second one goes on into another block
    table = torch.tensor([[0, 6], [1, 2], [3, 4]])
    pages = 8 + torch.arange(num * TOKENS_OF).view(num, TOKENS_OF)
    plain, drafted, before = (layout.view(held.clone(), 0) for _ in range(3))

    def batch(at: torch.Tensor, counts: tuple[int, ...], draft_pages: tuple[torch.Tensor, ...]) -> StepInputs:
        ends = starts + TOKENS_OF
        lens = RequestLens(ends, counts, tuple(ends.tolist()) if counts else (), 0)
        return StepInputs(at, at, (), (table,), None, 0 if counts else num, lens, draft_pages=draft_pages)

    positions = (starts[:, None] + torch.arange(TOKENS_OF)).flatten()
    whole = TorchStates(batch(positions, (TOKENS_OF,) * num, (pages,)), 0, size)
    found = layer.run(tokens, whole, drafted)
    for nth in range(TOKENS_OF):
        one = torch.arange(num) * TOKENS_OF + nth
        given = layer.run(tokens[one], TorchStates(batch(positions[one], (), ()), 0, size), plain)
        for ours, theirs in zip(found, given, strict=True):
            assert torch.equal(ours[one], theirs)
        written = table.gather(1, positions[one][:, None] // size)[:, 0]
        for mine, wanted in ((drafted.ssm, plain.ssm), (drafted.conv, plain.conv)):
            assert torch.equal(mine[:, pages[:, nth]], wanted[:, written])
    assert torch.equal(drafted.ssm[:, :8], before.ssm[:, :8]), "what the scheduler knows is as it was"


class Knowing(Scripted):
    """Knows the texts, and is wrong now and then."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__()
        self._known, self._dice = texts, np.random.default_rng(0)
        self.drafted = self.accepted = 0

    def propose(self, rows: I32, lens: I64, most: I32) -> Drafts:
        for row, length in zip(rows.tolist(), lens.tolist(), strict=True):
            held = self.tokens[row, :length].tolist()
            self.texts[row] = next(text for text in self._known if text[:length] == held)
        self.script = ((MOST, int(self._dice.integers(0, 2 * MOST))) for _ in repeat(0))
        return super().propose(rows, lens, most)

    def computed(self, step: StepColumns, counts: I32, hidden: torch.Tensor) -> None:
        self.drafted += 0 if step.drafts is None else int(step.drafts.counts.sum())
        self.accepted += int(counts.sum()) - len(counts)


@pytest.mark.parametrize(
    ("name", "mode", "size", "pages", "tp"),
    [
        ("mamba2", "align", 16, 5, 1),
        ("mamba", "all", 16, 8, 1),
        ("bamba", "align", 48, 14, 1),
        ("bamba", "all", 48, 14, 2),
        ("jamba", "align", 48, 20, 1),
        ("qwen3-next", "align", 48, 18, 1),
        ("falcon-h1", "none", 48, 12, 1),
        ("lfm2", "align", 16, 64, 1),
        ("recurrentgemma", "align", 32, 12, 1),
    ],
)
def test_served_in_little_memory(
    name: str, mode: str, size: int, pages: int, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, preemption, prefixes behind checkpoints, and NaN in all that no request needs: tokens are transformers'."""
    reference: Reference = written(CASES[name], tmp_path)
    flags_of_states: dict[str, Any] = {"mamba_cache_mode": mode, "mamba_block_size": size if mode != "none" else None}
    plainly = Engines(tmp_path, 64, "cpu", **flags_of_states)
    try:
        expected = served(plainly).tokens
    finally:
        plainly.close()
    assert expected == reference.greedy(expected)
    drafters: list[Knowing] = []

    def drafter_of(made: ModelEngine) -> Knowing:
        texts = [SERVED[min(handle, len(SERVED) - 1)] + tokens for handle, tokens in expected.items()]
        drafters.append(Knowing(texts))
        drafters[-1].tokens = made.rows.tokens.numpy()
        return drafters[-1]

    monkeypatch.setattr("meshlm.workers.speculative.drafters.drafter_of", drafter_of)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=MOST)
    engines = Engines(tmp_path, pages, "cpu", tp, speculative=drafts, **flags_of_states)
    try:
        bench = served(engines)
    finally:
        engines.close()
    assert bench.tokens == expected
    assert 10 < drafters[0].accepted < drafters[0].drafted - 10
    if mode != "none":
        assert bench.core.batching.num_preemptions > 0, "memory was to be too little"
        assert bench.cached[AGAIN[-1]] > 0, "nothing was found in the prefix cache"
