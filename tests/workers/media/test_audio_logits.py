"""Logits of prompts with clips are transformers' own, wherever the prompt is cut into two steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import Driver, engine
from hearing_models import CASES, IMAGE, Hearing, clip
from media_models import picture

from meshlm.protocol.sampling import SamplingParams

LONG, SHORT = clip(2, 9_877), clip(3, 701)
MOST_ROWS = 40  # each with a cut of its own: all that there are, of a prompt that is not longer


@pytest.fixture(scope="module", params=list(CASES))
def hearing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hearing:
    return Hearing(CASES[request.param], tmp_path_factory.mktemp("hearing"))


def errors(hearing: Hearing, text: str, given: list[Any]) -> float:
    """The largest difference of a logit from transformers', over all cuts, of the prompt's last token and of the one behind."""
    ids, media = hearing.prompt(text, given)
    assert media is not None
    cuts = sorted({*np.linspace(1, len(ids) - 1, min(len(ids) - 1, MOST_ROWS)).astype(int).tolist()})
    made = engine(
        hearing.folder,
        device="cpu",
        load_format="auto",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=MOST_ROWS,
        max_num_batched_tokens=2048,
        kv_cache_memory=1 << 28,
    )
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    driver = Driver(made, [ids] * len(cuts), sampling, audio=[media] * len(cuts))
    driver.step(dict(enumerate(cuts)))
    driver.step({row: len(ids) - cut for row, cut in enumerate(cuts)})
    driver.step(dict.fromkeys(range(len(cuts)), 1))
    (token,) = {tokens[0] for tokens in driver.tokens}
    expected = hearing.logits(text, given, [token])
    assert len(driver.seen) == 2 * len(cuts)
    found = [(one.logits - expected[one.length - len(ids)]).abs().max() for one in driver.seen]
    assert float(expected.std()) > 0.1, "the model was to tell tokens apart"
    return float(torch.stack(found).max())


@pytest.mark.parametrize("text", ["<audio> w5", "w1 w2 <audio>", "w1 <audio> w2 <audio> w3"])
def test_logits_are_transformers_however_a_prompt_is_cut(text: str, hearing: Hearing) -> None:
    assert errors(hearing, text, [LONG, SHORT][: text.count("<audio>")]) < 2e-3


def test_clips_of_several_windows(tmp_path: Path) -> None:
    for name in ("voxtral", "audio-flamingo-3"):
        hearing = Hearing(CASES[name], tmp_path / name)
        _, media = hearing.prompt("w1 <audio> w2", [clip(4, 20_001)])
        assert media is not None
        assert media.items[0].tensors[0].shape[0] == 2
        assert errors(hearing, "w1 <audio> w2", [clip(4, 20_001)]) < 2e-3


def test_logits_of_images_beside_clips(tmp_path: Path) -> None:
    hearing = Hearing(CASES["qwen2.5-omni"], tmp_path)
    assert errors(hearing, f"w1 {IMAGE} w4 <audio> w2", [picture(2, 45, 19), LONG]) < 2e-3
    assert errors(hearing, f"<audio> w4 {IMAGE}", [SHORT, picture(1, 32, 32)]) < 2e-3


def test_a_clip_changes_the_answer(hearing: Hearing) -> None:
    """Else the tests above would compare nothing."""
    one, other = (hearing.logits("w1 <audio> w2", [given], []) for given in (LONG, np.flip(LONG).copy()))
    assert float((one - other).abs().max()) > 0.05
