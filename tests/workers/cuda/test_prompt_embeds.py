"""Vectors in the place of tokens on a GPU: a step that computes them stays in its CUDA graph, and waits for nobody."""

from pathlib import Path

import msgspec
import pytest
import torch
from engine_driver import Driver, engine, prompts_of

from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.engine.engine import ModelEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
LENGTHS = [40, 33, 129]
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
LAST = 2  # the row that has vectors


@pytest.fixture(scope="module", params=["FULL", "NONE"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelEngine:
    folder: Path = tmp_path_factory.mktemp("model")
    return engine(folder, cudagraph_mode=request.param, enable_prompt_embeds=True)


def tokens_of(made: ModelEngine, *, vectors: bool) -> tuple[list[list[int]], int]:
    """The tokens of all rows, and how many mixed steps were replayed."""
    made.reset()
    driver = Driver(made, prompts_of(LENGTHS), GREEDY)
    if vectors:
        prompt = driver.prompts[LAST]
        own = made.model.embedding(torch.tensor(prompt, device=made.device)).view(torch.int16).cpu().numpy()
        spans = ((0, 50), (70, len(prompt) - 70))
        data = b"".join(own[first : first + count].tobytes() for first, count in spans)
        told = [token if 50 <= place < 70 else 5 for place, token in enumerate(prompt)]
        row = driver._row(LAST, told)
        driver._new[LAST] = msgspec.structs.replace(row, extras=(PromptEmbeds("bfloat16", spans, data),))
    driver.step({0: 40})
    before = made.graphs.replays["mixed"]
    driver.strict = True
    driver.step({0: 1, 1: 33, LAST: 60})
    driver.step({0: 1, 1: 1, LAST: 69})
    replayed = made.graphs.replays["mixed"] - before
    for _ in range(4):
        driver.step(dict.fromkeys(range(3), 1))
    return driver.tokens, replayed


def test_a_step_with_vectors_is_the_graph_of_one_without(made: ModelEngine) -> None:
    """Chunks cut the vectors; those of the model's own table give what their tokens give, and the neighbours' tokens are the same."""
    while made.idle():
        pass
    expected, replayed = tokens_of(made, vectors=False)
    found, with_vectors = tokens_of(made, vectors=True)
    assert found == expected
    assert with_vectors == replayed
    assert replayed == (2 if made.graphs.keys else 0)
    again, _ = tokens_of(made, vectors=False)
    assert again == expected, "what the buffer holds is nobody's"
