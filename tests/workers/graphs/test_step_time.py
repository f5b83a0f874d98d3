"""How long a step takes at the least, and which steps with long contexts are replayed from CUDA graphs: pure, no GPU."""

import numpy as np
import pytest

pytest.importorskip("torch")
from tiny_models import spec_of

from meshlm.workers.graphs.dispatcher import PATIENCE, Dispatcher
from meshlm.workers.graphs.keys import (
    ANY,
    LONG,
    LONG_CONTEXT,
    LONG_LAUNCHES_S,
    SHORT,
    Key,
    StepTime,
    graph_keys,
    long_requests,
    of_model,
)
from meshlm.workers.rows.step_columns import Contexts, columns_of

PARAMETERS, SHORT_CONTEXT = 8_000_000_000, 8192
LLAMA = StepTime(2 * PARAMETERS / 6e14, 32 * 4 * 32 * 128 / 6e14, 32 * 2 * 8 * 128 * 2 / 4e12)  # of 8B parameters


def found(
    tokens: int, contexts: Contexts | None, step_time: StepTime | None = LLAMA
) -> tuple[Key | None, dict[str, int]]:
    graphs = Dispatcher(graph_keys("FULL", 1024, 8192, (), PARAMETERS), lambda key: None, step_time=step_time)
    key = [graphs.find(tokens, 4, uniform=False, contexts=contexts) for _ in range(PATIENCE + 1)][-1]
    return key, dict(graphs.misses)


def test_a_mixed_step_with_long_contexts_has_no_graph() -> None:
    contexts = Contexts(32_000, 1021 * 16_000, 96_000)
    assert found(1024, contexts) == (None, {"long_context": PATIENCE + 1})
    assert found(1024, contexts, step_time=None)[0] is not None, "where nothing is known of the model's time"


def test_steps_of_short_contexts_have_the_graphs_that_they_had() -> None:
    short = Contexts(LONG_CONTEXT - 1, 960 * 2000, 64 * (LONG_CONTEXT - 2))
    assert LLAMA.of(1024, short) > LONG_LAUNCHES_S
    assert found(1024, short)[0] == found(1024, None)[0] == Key(1024, 72)


def test_a_step_that_is_launched_no_faster_than_it_runs_keeps_its_graph() -> None:
    few = Contexts(32_000, 128 * 16_000, 32_000)
    assert LLAMA.of(131, few) < LONG_LAUNCHES_S
    assert found(131, few)[0] == Key(256, 72)


SEEN = Contexts(32_000, 508 * 16_000, 96_000)


def with_long(max_num_seqs: int = 1024) -> Dispatcher:
    keys = graph_keys("FULL", max_num_seqs, 8192, (), PARAMETERS)
    return Dispatcher(keys, lambda key: None, step_time=LLAMA, long=long_requests(max_num_seqs))


@pytest.mark.parametrize(
    ("tokens", "requests", "key"),
    [
        (512, 4, Key(512, 5, contexts=LONG)),
        (512, 5, Key(512, 9, contexts=LONG)),
        (513, 8, Key(640, 9, contexts=LONG)),
        (1024, 32, Key(1024, 33, contexts=LONG)),
        (131, 4, Key(256, 5, contexts=LONG)),
    ],
)
def test_a_few_requests_with_long_contexts_have_graphs_of_their_own(tokens: int, requests: int, key: Key) -> None:
    graphs = with_long()
    asked = [graphs.find(tokens, requests, uniform=False, contexts=SEEN) for _ in range(PATIENCE + 2)]
    assert [found for found in asked if found is not None and found.contexts == LONG] == [key] * 2
    assert asked[0] != key
    graphs._graphs[key] = object()  # type: ignore[assignment]
    assert graphs.find(tokens, requests, uniform=False, contexts=SEEN) == key
    short = SEEN._replace(longest=LONG_CONTEXT - 1)
    again = [graphs.find(tokens, requests, uniform=False, contexts=short) for _ in range(PATIENCE + 1)][-1]
    assert again is not None
    assert again.contexts == ANY


def test_more_requests_and_longer_steps_with_long_contexts_are_launched_by_hand() -> None:
    graphs = with_long()
    for tokens, requests in ((512, 33), (1024, 64)):
        for _ in range(PATIENCE + 2):
            assert graphs.find(tokens, requests, uniform=False, contexts=SEEN) is None
    assert dict(graphs.misses) == {"long_context": 2 * (PATIENCE + 2)}
    assert graphs.find(1500, 4, uniform=False, contexts=SEEN) is None, (
        "it takes so long that launching it costs nothing"
    )
    for _ in range(PATIENCE + 2):
        assert graphs.find(512, 4, uniform=False, contexts=SEEN, shared=True) is None, "its decodes read prefixes once"


def test_graphs_for_long_contexts_are_captured_for_nobody_else() -> None:
    """Neither at the start nor in idle time; one that cannot be captured leaves its steps to the host."""
    graphs = with_long()
    assert not any(key.contexts == LONG for key in graphs.first(everything=True))
    wanted = Key(512, 5, contexts=LONG)
    assert [graphs.find(512, 4, uniform=False, contexts=SEEN) for _ in range(PATIENCE + 1)][-1] == wanted
    graphs._refused.add(wanted)
    assert graphs.find(512, 4, uniform=False, contexts=SEEN) is None
    assert graphs.misses["long_context"] == PATIENCE + 1


def test_a_server_of_one_request_has_them_too() -> None:
    assert long_requests(1) == [2]
    graphs = with_long(1)
    found = [graphs.find(512, 1, uniform=False, contexts=SEEN) for _ in range(PATIENCE + 1)][-1]
    assert found == Key(512, 2, contexts=LONG)


def test_decodes_with_short_contexts_have_graphs_of_their_own() -> None:
    keys = graph_keys("FULL", 64, 8192, (), PARAMETERS)
    short = [Key(size, size, contexts=SHORT) for size in (1, 2)]
    graphs = Dispatcher([*keys, *short], lambda key: None, step_time=LLAMA, short_context=SHORT_CONTEXT)
    assert set(short) <= set(graphs.first()), "contexts are short at first"
    seen = Contexts(SHORT_CONTEXT, 0.0, SHORT_CONTEXT)
    assert graphs.find(1, 1, uniform=True, contexts=seen) == Key(1, 1), "until it is captured"
    graphs._graphs.update({key: object() for key in short})  # type: ignore[misc]
    assert graphs.find(1, 1, uniform=True, contexts=seen) == short[0]
    assert graphs.find(1, 1, uniform=True, contexts=seen._replace(longest=SHORT_CONTEXT + 1)) == Key(1, 1)
    assert graphs.find(1, 1, uniform=True) == Key(1, 1)
    assert graphs.find(4, 4, uniform=True, contexts=seen) == Key(4, 4)
    assert [graphs.asks_for_contexts(count, uniform=True) for count in (1, 2, 3)] == [True, True, False]
    assert graphs.asks_for_contexts(3, uniform=False)


def test_what_no_graph_holds_is_too_long_for_that_reason() -> None:
    assert found(1500, Contexts(32_000, 1497 * 16_000, 96_000)) == (None, {"too_many_tokens": PATIENCE + 1})


def test_what_a_step_s_requests_see() -> None:
    rows, starts, counts = (np.array(line, np.int32) for line in ([0, 1, 2, 3], [10, 9000, 0, 500], [1, 1, 64, 100]))
    contexts = columns_of(rows, starts, counts).contexts()
    assert contexts == Contexts(9001, 64 * 32 + 100 * 550, 9010)
    nothing = np.zeros(0, np.int32)
    assert columns_of(nothing, nothing, nothing).contexts() == Contexts(0, 0.0, 0)


def test_only_layers_that_see_all_count() -> None:
    full = of_model(spec_of(), 1000, 2)
    assert full == StepTime(2000 / 6e14, 4 * 8 / 6e14, 2 * 8 * 2 / 4e12)
    some = spec_of(num_hidden_layers=4, sliding_window=16, sliding_layers=(True, False, True, True))
    assert of_model(some, 1000, 2) == full
    assert of_model(spec_of(sliding_window=16), 1000, 2) == of_model(spec_of(attention_chunk_size=16), 1000, 2)
    assert of_model(spec_of(sliding_window=16), 1000, 2) == StepTime(full.token_s)
