"""Models that see, behind a scheduler: tokens stay transformers' own, with images cut by chunks, cached, preempted, of any size.

What no request needs any more is overwritten with NaN before each step.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from media_cases import CASES
from media_models import LENGTH, Seeing, picture
from served_engines import Engines
from serving_images import OUTPUT, STEP, ask, behind

from meshlm.workers.media.stage import EncoderStage
from meshlm.workers.rows.extras.media_rows import MediaRows

STATES = {"linear_attention", "conv"}
ONE, WIDE, TALL = picture(1, 32, 32), picture(2, 45, 19), picture(3, 14, 37)


def words(first: int, count: int) -> str:
    return " ".join(f"w{(first + 7 * nth) % 120}" for nth in range(count))


PROMPTS: list[tuple[str, list[Any]]] = [
    ("<image> w5 w6", [ONE]),
    ("w1 w2 w3 <image>", [WIDE]),
    (f"{words(3, 9)} <image> w4 <image> {words(9, 4)}", [TALL, WIDE]),
    (words(5, 30), []),
    (f"{words(11, 45)} <image> w7", [ONE]),
    (f"{words(2, 21)} <image> {words(8, 5)} <image><image> {words(1, 11)}", [WIDE, ONE, TALL]),
]


@pytest.fixture(scope="module", params=list(CASES))
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(CASES[request.param], tmp_path_factory.mktemp("seeing"))


@pytest.fixture(params=["cpu", "torch"])
def engines(request: pytest.FixtureRequest, seeing: Seeing) -> Iterator[Engines]:
    made = Engines(seeing.folder, 26, request.param, max_model_len=LENGTH, max_num_batched_tokens=STEP)
    yield made
    made.close()


def test_tokens_are_transformers(seeing: Seeing, engines: Engines) -> None:
    between = "><" if not seeing.case.merge else "> w9 <"  # transformers' M-RoPE takes images side by side for one
    asked = [(text.replace("><", between).replace("<image>", seeing.placeholder), images) for text, images in PROMPTS]
    prompts = [seeing.prompt(*one) for one in asked]
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
        logits = seeing.logits(*asked[again.get(handle, handle)], tokens[:-1])
        assert tokens == logits.argmax(-1).tolist(), f"request {handle}"
        assert len(tokens) == OUTPUT
    assert bench.core.batching.num_preemptions > 0, "memory was to be too little"
    inside = prompts[1][1]
    assert inside is not None
    if not STATES & set(
        seeing.case.text.get("layer_types", ())
    ):  # nothing of them is left in so little memory; see below
        assert bench.cached[12] > 0
        assert inside.items[0].position < bench.cached[13], "a prefix was to end inside an image"
    stage = engines.engines[0].extras.kind(MediaRows).encoder
    assert isinstance(stage, EncoderStage)
    assert stage.cache.hits > 0
    stage.cache.check()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_state_behind_an_image_is_found_again(backend: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = Seeing(CASES["qwen3.5"], tmp_path_factory.mktemp("states"))
    engines = Engines(model.folder, 60, backend, max_model_len=LENGTH, max_num_batched_tokens=STEP, mamba_block_size=48)
    texts = [f"{words(2, 21)} <image> w3 <image> {words(nth, 30)}" for nth in (4, 4, 5)]
    images = [[WIDE, TALL], [WIDE, TALL], [ONE, TALL]]
    try:
        bench = behind(engines)
        for nth, prompt in enumerate(zip(texts, images, strict=True)):
            ask(bench, nth, *model.prompt(*prompt))
            bench.finish()
    finally:
        engines.close()
    assert bench.cached[1] == 48
    assert bench.cached[2] == 0, "another image is another prefix"
    for nth, tokens in bench.tokens.items():
        assert tokens == model.logits(texts[nth], images[nth], tokens[:-1]).argmax(-1).tolist(), f"request {nth}"


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_tensor_parallel_ranks_each_encode(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = Seeing(CASES[name], tmp_path_factory.mktemp("ranks"))
    engines = Engines(model.folder, 40, "torch", tp=2, max_model_len=LENGTH, max_num_batched_tokens=STEP)
    text, images = f"{words(2, 21)} {model.placeholder} w3 {model.placeholder}", [WIDE, TALL]
    try:
        bench = behind(engines)
        ask(bench, 0, *model.prompt(text, images))
        bench.finish()
    finally:
        engines.close()
    assert bench.tokens[0] == model.logits(text, images, bench.tokens[0][:-1]).argmax(-1).tolist()
