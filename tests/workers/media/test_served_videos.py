"""Models that take videos, behind a scheduler: tokens stay transformers' own, with clips cut by chunks, cached, preempted, of any size
and length, and images beside them. What no request needs any more is overwritten with NaN before each step."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from media_cases import CASES
from media_models import LENGTH, picture
from served_engines import Engines
from serving_images import OUTPUT, STEP, ask, behind
from video_models import GRIDS, VIDEO, WATCHING, Watching, clip

from meshlm.workers.media.positions import rope_shift
from meshlm.workers.media.stage import EncoderStage
from meshlm.workers.rows.extras.media_rows import MediaRows

SHORT, ODD, ONE = clip(1, 4), clip(2, 5, 45, 19, fps=2.0, every=3), clip(3, 1)
EVEN = [
    picture(2, 45, 19),
    SHORT,
    picture(1, 32, 32),
    clip(4, 4, 45, 19),
]  # transformers takes no clips of two lengths at once
PROMPTS: list[tuple[str, list[Any]]] = [
    (f"{VIDEO} w5 w6", [SHORT]),
    (f"w1 w2 w3 {VIDEO}", [ODD]),
    (f"w1 {VIDEO} w2", [ONE]),
    (f"w4 <image> w3 {VIDEO} w9 w8 <image> w7 {VIDEO} w5", [picture(2, 45, 19), SHORT, picture(1, 32, 32), ODD]),
]


@pytest.fixture(scope="module", params=WATCHING)
def watching(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Watching:
    return Watching(request.param, tmp_path_factory.mktemp("watching"))


@pytest.fixture
def engines(watching: Watching) -> Iterator[Engines]:
    made = Engines(watching.folder, 34, "cpu", max_model_len=LENGTH, max_num_batched_tokens=STEP)
    yield made
    made.close()


def test_tokens_are_transformers(watching: Watching, engines: Engines) -> None:
    asked = PROMPTS if watching.case.merge else [*PROMPTS[:-1], (PROMPTS[-1][0], EVEN)]
    prompts = [watching.mixed(*one) for one in asked]
    bench = behind(engines)
    for nth, prompt in enumerate(prompts):
        ask(bench, nth, *prompt)
    bench.finish()
    again = {10: 3, 11: 1, 12: 3}
    for handle, nth in again.items():
        ask(bench, handle, *prompts[nth])
        bench.finish()
    assert not bench.refused
    for handle, tokens in bench.tokens.items():
        logits = watching.logits(*asked[again.get(handle, handle)], tokens[:-1])
        assert tokens == logits.argmax(-1).tolist(), f"request {handle}"
        assert len(tokens) == OUTPUT
    assert max(len(ids) for ids, _ in prompts) > STEP, "a chunk was to end inside"
    assert watching.name == "qwen3.5" or bench.cached[11] > 0, "of states few are kept"
    stage = engines.engines[0].extras.kind(MediaRows).encoder
    assert isinstance(stage, EncoderStage)
    assert stage.cache.hits > 0
    stage.cache.check()


@pytest.mark.parametrize("name", [name for name in WATCHING if CASES[name].merge])
def test_positions_are_transformers(name: str, tmp_path: Any) -> None:
    watching = Watching(name, tmp_path)
    for prompt in PROMPTS:
        _check_positions(watching, *prompt)


def _check_positions(watching: Watching, prompt: str, contents: list[Any]) -> None:
    ids, media = watching.mixed(prompt, contents)
    out = watching.given(prompt, contents)
    text, given = torch.tensor([[5]]), {name: out[name] for name in GRIDS if name in out}
    types = torch.cat((out["mm_token_type_ids"], torch.zeros_like(text)), dim=1)
    expected, _ = watching.theirs.model.get_rope_index(torch.cat((out["input_ids"], text), dim=1), types, **given)
    assert (rope_shift(media.items).of(0, len(ids) + 1) + np.arange(len(ids) + 1)).tolist() == expected[:, 0].tolist()


def test_answers_go_on_behind_the_text_whatever_the_seconds(tmp_path: Any) -> None:
    """A long video with little text behind it: its frames' positions are higher than those of the text."""
    model = Watching("qwen2.5-vl", tmp_path)
    text, contents = f"w1 {VIDEO} w2", [clip(4, 6, 8, 8, fps=1.0, every=20)]
    ids, media = model.mixed(text, contents)
    assert media.items[0].times[-1] > LENGTH
    engines = Engines(model.folder, 34, "cpu", max_model_len=LENGTH, max_num_batched_tokens=STEP)
    try:
        bench = behind(engines)
        ask(bench, 0, ids, media)
        bench.finish()
    finally:
        engines.close()
    generated = model.theirs.generate(**model.given(text, contents), max_new_tokens=OUTPUT, do_sample=False)
    assert bench.tokens[0] == generated[0, len(ids) :].tolist()
