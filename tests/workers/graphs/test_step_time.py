"""How long a step takes at the least, and which steps with long contexts are replayed from CUDA graphs: pure, no GPU."""

import numpy as np
import pytest

pytest.importorskip("torch")
from tiny_models import spec_of

from meshlm.workers.engine.columns import columns_of
from meshlm.workers.graphs.dispatcher import LONG_LAUNCHES_S, PATIENCE, Dispatcher, Key, graph_keys
from meshlm.workers.graphs.step_time import LONG_CONTEXT, Contexts, StepTime, of_model

PARAMETERS = 8_000_000_000
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
