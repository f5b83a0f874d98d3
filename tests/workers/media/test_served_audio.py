"""Models that hear, behind a scheduler: tokens stay transformers' own, with clips cut by chunks, cached, preempted, of any length.

What no request needs any more is overwritten with NaN before each step.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from hearing_models import CASES, Hearing, clip
from media_models import LENGTH
from served_engines import Engines
from serving_images import OUTPUT, STEP, ask, behind

from meshlm.workers.media.stage import EncoderStage
from meshlm.workers.rows.extras.media_rows import MediaRows

WHOLE, ODD, SHORT = clip(1, 16_000), clip(2, 9_877), clip(3, 701)


def words(first: int, count: int) -> str:
    return " ".join(f"w{(first + 7 * nth) % 120}" for nth in range(count))


PROMPTS: list[tuple[str, list[Any]]] = [
    ("<audio> w5 w6", [WHOLE]),
    ("w1 w2 w3 <audio>", [ODD]),
    (f"{words(3, 9)} <audio> w4 <audio> {words(9, 4)}", [SHORT, ODD]),
    (words(5, 30), []),
    (f"{words(11, 45)} <audio> w7", [WHOLE]),
    (f"{words(2, 21)} <audio> {words(8, 5)} <audio><audio> {words(1, 11)}", [ODD, WHOLE, SHORT]),
]


@pytest.fixture(scope="module", params=list(CASES))
def hearing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hearing:
    return Hearing(CASES[request.param], tmp_path_factory.mktemp("hearing"))


@pytest.fixture(params=["cpu", "torch"])
def engines(request: pytest.FixtureRequest, hearing: Hearing) -> Iterator[Engines]:
    made = Engines(hearing.folder, hearing.case.pages, request.param, max_model_len=LENGTH, max_num_batched_tokens=STEP)
    yield made
    made.close()


def test_tokens_are_transformers(hearing: Hearing, engines: Engines) -> None:
    prompts = [hearing.prompt(*one) for one in PROMPTS]
    bench = behind(engines)
    for nth, prompt in enumerate(prompts):
        ask(bench, nth, *prompt)
    bench.finish()
    again = {10: 5, 11: 1, 12: 5, 13: 1}
    for handle, nth in again.items():
        ask(bench, handle, *prompts[nth])
        bench.finish()
    assert not bench.refused
    for handle, tokens in bench.tokens.items():
        logits = hearing.logits(*PROMPTS[again.get(handle, handle)], tokens[:-1])
        assert tokens == logits.argmax(-1).tolist(), f"request {handle}"
        assert len(tokens) == OUTPUT
    assert bench.core.batching.num_preemptions > 0, "memory was to be too little"
    assert bench.cached[12] > 0
    stage = engines.engines[0].extras.kind(MediaRows).encoder
    assert isinstance(stage, EncoderStage)
    assert stage.cache.hits > 0
    stage.cache.check()
