"""Which graph a step is replayed from: pure, no GPU."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
from meshlm.scheduler_proc.budget import MOST_MIXED_TOKENS, on_grid
from meshlm.workers.graphs.dispatcher import (
    PATIENCE,
    PATIENCE_DECODES,
    PATIENCE_MIXED,
    PATIENCE_SHARED,
    WIDEST,
    Dispatcher,
)
from meshlm.workers.graphs.keys import (
    HEAD,
    LONG,
    LONG_CONTEXT,
    MIXED_TOKENS,
    MODEL,
    SHORT,
    WHOLE,
    Key,
    StepTime,
    decode_sizes,
    graph_keys,
    keys_of_adapters,
    keys_of_drafts,
)
from meshlm.workers.rows.step_columns import Contexts

SMALL_MODEL, LARGE_MODEL = 440_000_000, 7_000_000_000


def dispatcher(mode: str = "FULL", num_parameters: int = SMALL_MODEL) -> Dispatcher:
    def capture(key: Key) -> None:
        raise AssertionError("nothing is captured here")

    return Dispatcher(graph_keys(mode, 256, 8192, (), num_parameters), capture)


def test_sizes_end_at_the_largest_batch() -> None:
    assert decode_sizes(3) == [1, 2, 3]
    assert decode_sizes(5000)[-1] == 1024


@given(st.integers(1, 256))
def test_decodes_waste_at_most_an_eighth(num_decodes: int) -> None:
    key = dispatcher().find(num_decodes, num_decodes, uniform=True)
    assert key is not None
    assert key.uniform
    assert num_decodes <= key.requests < num_decodes + max(8, num_decodes / 8 + 1)


@given(st.integers(2, 3000), st.integers(1, 256))
def test_mixed_steps_fit_with_a_request_to_spare(num_tokens: int, num_requests: int) -> None:
    steps = dispatcher()
    num_requests = min(num_requests, num_tokens)
    for _ in range(PATIENCE + 1):
        key = steps.find(num_tokens, num_requests, uniform=False)
    if key is None:
        assert sum(steps.misses.values()) == PATIENCE + 1
    else:
        assert key.tokens >= num_tokens
        assert key.requests > num_requests


@given(st.integers(1, 2000), st.data())
def test_a_mixed_step_of_all_running_requests_has_a_graph(max_num_seqs: int, data: st.DataObject) -> None:
    """Wherever graphs of so many tokens exist: a prompt or chunk beside all others, one of them without a token to spare."""
    keys = graph_keys("FULL", max_num_seqs, 8192, (), SMALL_MODEL)
    assert max(key.requests for key in keys) <= max_num_seqs + 1
    assert all(key.requests < key.tokens for key in keys if not key.uniform)
    steps = Dispatcher(keys, lambda key: None)
    tokens = data.draw(st.integers(max_num_seqs + 2, max(4096, max_num_seqs + 2)))
    found = [steps.find(tokens, max_num_seqs, uniform=False) for _ in range(PATIENCE + 1)][-1]
    assert found is not None
    assert found.requests > max_num_seqs
    assert found.tokens >= tokens


def test_a_mixed_graph_must_be_asked_for_again_and_again() -> None:
    steps = dispatcher()
    found = [steps.find(300, 3, uniform=False) for _ in range(PATIENCE + 1)]
    assert found[:-1] == [None] * PATIENCE
    assert found[-1] == Key(384, 72)
    assert steps.misses == {"not_captured": PATIENCE}


def test_large_models_have_mixed_graphs_for_few_tokens_only() -> None:
    tokens = {key.tokens for key in graph_keys("FULL", 256, 8192, (), LARGE_MODEL) if not key.uniform}
    assert tokens == {*range(128, 1025, 128)}


@pytest.mark.parametrize(
    ("mode", "uniform", "mixed"),
    [
        ("NONE", False, False),
        ("FULL_DECODE_ONLY", True, False),
        ("PIECEWISE", False, True),
        ("FULL", True, True),
        ("FULL_AND_PIECEWISE", True, True),
    ],
)
def test_modes(mode: str, uniform: bool, mixed: bool) -> None:
    keys = graph_keys(mode, 256, 8192, (), SMALL_MODEL)
    assert any(key.uniform for key in keys) == uniform
    assert any(not key.uniform for key in keys) == mixed


@pytest.mark.parametrize("num_parameters", [SMALL_MODEL, LARGE_MODEL])
def test_own_sizes_are_those_of_all_graphs(num_parameters: int) -> None:
    """Mixed graphs had the usual sizes whatever was asked for, and decodes where none of them fitted."""

    def tokens(sizes: tuple[int, ...], uniform: bool, mode: str = "FULL", **more: int) -> list[int]:
        keys = graph_keys(mode, 64, 2048, sizes, num_parameters, **more)  # type: ignore[arg-type]
        return sorted({key.tokens for key in keys if key.uniform == uniform})

    sizes = (8, 64, 100, 128, 200, 2048, 4096)
    assert tokens(sizes, uniform=True) == [8, 64]
    assert tokens(sizes, uniform=False) == [128, 200, 2048]
    assert tokens((256, 512), uniform=True) == tokens((8,), uniform=False) == []
    assert tokens((), uniform=False, most_tokens=2048)[-1] == 2048, "whatever a step's launches take"
    assert tokens((), uniform=False, most_tokens=200) == [128]
    assert tokens((), uniform=True, most_tokens=16)[-1] == 16


def test_own_sizes_and_a_miss_with_its_reason() -> None:
    steps = Dispatcher(graph_keys("FULL_DECODE_ONLY", 256, 8192, (4, 16), SMALL_MODEL), lambda key: None)
    assert steps.find(5, 5, uniform=True) == Key(16, 16)
    assert steps.find(17, 17, uniform=True) is None
    assert dict(steps.misses) == {"too_many_decodes": 1}
    off = dispatcher("NONE")
    assert off.find(1, 1, uniform=True) is None
    assert dict(off.misses) == {"off": 1}


def test_a_larger_decode_graph_does_for_the_first_few_steps() -> None:
    steps = dispatcher()
    steps._graphs[Key(64, 64)] = steps._graphs[Key(256, 256)] = object()  # type: ignore[assignment]
    found = [steps.find(50, 50, uniform=True) for _ in range(PATIENCE_DECODES + 1)]
    assert found[:-1] == [Key(64, 64)] * PATIENCE_DECODES
    assert found[-1] == Key(56, 56)
    too_wide = 64 // WIDEST - 8
    assert steps.find(too_wide, too_wide, uniform=True) == Key(too_wide, too_wide)
    assert steps.find(64, 64, uniform=True) == Key(64, 64)


def test_a_larger_mixed_graph_does_for_the_first_few_steps() -> None:
    steps = dispatcher()
    for key in (Key(512, 72), Key(4096, 72), Key(4096, 257)):
        steps._graphs[key] = object()  # type: ignore[assignment]
    found = [steps.find(300, 3, uniform=False) for _ in range(PATIENCE_MIXED + 1)]
    assert found == [Key(512, 72)] * PATIENCE_MIXED + [Key(384, 72)]
    assert steps.find(3000, 100, uniform=False) == Key(4096, 257)
    assert not steps.misses
    assert steps.find(600, 3, uniform=False) is None  # 4,096 tokens would take longer than launching it
    assert steps.misses == {"not_captured": 1}


@given(st.integers(1, 1100), st.integers(1, 4096), st.data())
def test_with_the_first_graphs_every_step_has_one(max_num_seqs: int, num_tokens: int, data: st.DataObject) -> None:
    steps = Dispatcher(graph_keys("FULL", max_num_seqs, 8192, (), SMALL_MODEL), lambda key: None)
    first = steps.first()
    assert set(first) <= set(steps.keys)
    assert sorted(steps.first(everything=True)) == steps.keys
    assert len(first) <= 29
    steps._graphs.update({key: object() for key in first})  # type: ignore[misc]
    num_requests = data.draw(st.integers(1, min(max_num_seqs, num_tokens)))
    for count, uniform in ((num_requests, True), (num_tokens, False)):
        if num_requests > 1024 or (not uniform and num_requests + 1 >= 4096):
            continue
        found = steps.find(count, num_requests, uniform=uniform)
        assert found in first, (count, num_requests, uniform)


def test_mixed_graphs_end_where_the_scheduler_ends_steps() -> None:
    assert all(on_grid(tokens) == tokens for tokens in MIXED_TOKENS)
    assert {on_grid(tokens) for tokens in range(513, MOST_MIXED_TOKENS + 1)} <= set(MIXED_TOKENS)


def test_ranks_that_share_experts_have_graphs_of_longer_steps() -> None:
    """Their steps take the host longer to launch: of 3.3 billion parameters a token, 4,096 tokens and more."""
    alone, together = (graph_keys("FULL", 64, 16384, (), 3_300_000_000, together=with_) for with_ in (False, True))
    assert max(key.tokens for key in alone) == 2048
    assert max(key.tokens for key in together) == 8192
    assert [key for key in together if key.uniform] == [key for key in alone if key.uniform]


def test_a_new_group_s_ranks_begin_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """One was just started, another has failed to capture a graph with the group before: they capture the same ones, in step."""
    refused, captured = {Key(4, 4)}, list[Key]()
    steps = Dispatcher([Key(2, 2), Key(4, 4), Key(4, 4, halves=True)], captured.append)

    def record(launch: Any) -> object:
        launch()
        if captured[-1] in refused:
            raise RuntimeError("not now")
        return object()

    monkeypatch.setattr(steps._recorder, "record", record)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    for expected in ([Key(2, 2), Key(4, 4, halves=True)], [Key(2, 2), Key(4, 4), Key(4, 4, halves=True)]):
        steps.forget()
        while not steps.complete:
            steps.background()
        assert steps.keys == expected
        assert steps.find(4, 4, uniform=True, halves=True) == Key(4, 4, halves=True)
        refused.clear()
    assert steps.find(4, 4, uniform=True) == Key(4, 4)
    assert steps.find(9, 2, uniform=False, halves=True) is None
    assert not steps.misses["too_many_tokens"], "a step that is not halved is asked for anew"


def test_mixed_graphs_have_room_for_some_prompts_alone() -> None:
    """Where each costs memory: of states between its pieces."""
    keys = graph_keys("FULL", 256, 8192, (), SMALL_MODEL, states=True)
    steps = Dispatcher(keys, lambda key: None, most_prompts=2)
    for key in keys:
        steps._graphs[key] = None  # type: ignore[assignment]
    assert steps.find(500, 40, uniform=False, num_prompts=2) == Key(512, 72)
    assert steps.find(500, 40, uniform=False, num_prompts=3) is None
    assert steps.find(40, 40, uniform=True) == Key(40, 40)
    assert steps.misses == {"too_many_prompts": 1}


def test_models_with_states_have_larger_mixed_graphs() -> None:
    """Launching their kernels takes the host longer."""
    usual, states = (graph_keys("FULL", 64, 8192, (), 9 * 10**9, states=with_) for with_ in (False, True))
    assert max(key.tokens for key in usual) == 896
    assert max(key.tokens for key in states) == 3584


def shared_find(steps: Dispatcher, tokens: int, requests: int) -> Key | None:
    return steps.find(tokens, requests, uniform=tokens == requests, shared=True)


@pytest.mark.parametrize(("size", "plain"), [((50, 50), Key(56, 56)), ((300, 3), Key(384, 72))])
def test_steps_that_share_prefixes_take_plain_graphs_until_they_have_asked_often(
    size: tuple[int, int], plain: Key
) -> None:
    steps = dispatcher()
    steps._graphs[plain] = object()  # type: ignore[assignment]
    found = [shared_find(steps, *size) for _ in range(PATIENCE_SHARED + 2)]
    assert found == [plain] * PATIENCE_SHARED + [plain._replace(shared=True)] * 2
    assert steps.find(*size, uniform=plain.uniform) == plain
    assert not steps.misses


def test_a_larger_shared_graph_does_for_the_first_few_steps() -> None:
    steps = dispatcher()
    shared = Key(64, 64, shared=True)
    steps._graphs[shared] = object()  # type: ignore[assignment]
    assert shared_find(steps, 50, 50) == shared
    assert shared_find(steps, 9, 9) == Key(16, 16)
    assert steps.find(50, 50, uniform=True) == Key(56, 56)


def test_shared_graphs_are_captured_for_nobody_else() -> None:
    """Neither at the start nor in idle time; and a plain one that is dropped has no second one."""
    steps = dispatcher()
    assert not any(key.shared for key in [*steps.keys, *steps.first(everything=True)])
    steps._keep([Key(8, 8)])
    for _ in range(PATIENCE_SHARED + 1):
        found = shared_find(steps, 9, 9)
    assert found is None
    assert shared_find(steps, 5, 5) == Key(8, 8)


def test_long_contexts_decide_first() -> None:
    """What a step reads once for many counts once (Contexts); what is long all the same is launched kernel by kernel."""
    steps = Dispatcher(
        graph_keys("FULL", 256, 8192, (), SMALL_MODEL), lambda key: None, step_time=StepTime(0.0, 0.0, 1.0)
    )
    contexts = Contexts(100_000, 0.0, 100_000)
    for _ in range(PATIENCE_SHARED + 2):
        assert steps.find(300, 3, uniform=False, contexts=contexts, shared=True) is None
    assert dict(steps.misses) == {"long_context": PATIENCE_SHARED + 2}


def test_the_head_has_one_graph() -> None:
    key = Key(8, 8, shared=True, contexts=LONG)
    assert key.of(MODEL) == Key(8, 8, part=MODEL, shared=True, contexts=LONG)
    assert key.of(HEAD) == Key(8, 8, part=HEAD)
    assert key.of(WHOLE) == key


def with_adapters() -> Dispatcher:
    keys = graph_keys("FULL", 8, 512, (), SMALL_MODEL)
    keys += [key._replace(contexts=SHORT) for key in keys if key.uniform] + keys_of_drafts(24)
    return Dispatcher(keys + keys_of_adapters(keys), lambda key: None, long=[5, 9])


@pytest.mark.parametrize("adapters", [False, True])
def test_steps_with_adapters_have_graphs_of_their_own(adapters: bool) -> None:
    """And those without are replayed as if there were none."""
    graphs = with_adapters()
    decode = graphs.find(3, 3, uniform=True, adapters=adapters)
    mixed = [graphs.find(90, 3, uniform=False, adapters=adapters) for _ in range(PATIENCE + 1)][-1]
    drafted = graphs.find(7, 7, uniform=True, drafts=True, adapters=adapters)
    seen = Contexts(LONG_CONTEXT, 1.0, 1)
    long = [graphs.find(90, 3, uniform=False, contexts=seen, adapters=adapters) for _ in range(PATIENCE + 1)][-1]
    assert decode == Key(4, 4, adapters=adapters)
    assert mixed == Key(128, 9, adapters=adapters)
    assert drafted == Key(8, 8, drafts=True, adapters=adapters)
    assert long == Key(128, 5, contexts=LONG, adapters=adapters)
    assert decode.of(HEAD) == Key(4, 4, part=HEAD), "the head knows nothing of adapters"


def test_graphs_of_both_kinds_are_captured_at_the_start() -> None:
    """The same sizes of each, so that no step of either kind is far from one."""
    first = with_adapters().first()
    of_adapters = {key._replace(adapters=False) for key in first if key.adapters}
    assert of_adapters == {key for key in first if not key.adapters and key.contexts != SHORT}
    assert Key(8, 8, adapters=True) in first
