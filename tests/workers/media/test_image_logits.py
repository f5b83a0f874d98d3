"""Logits of prompts with images are transformers' own, wherever the prompt may be cut into two steps."""

import numpy as np
import pytest
import torch
from engine_driver import Driver, engine
from media_cases import CASES
from media_models import LENGTH, Seeing, picture

from meshlm.protocol.media import Media
from meshlm.protocol.sampling import SamplingParams

ONE, WIDE, TALL = picture(1, 32, 32), picture(2, 45, 19), picture(3, 14, 37)
MOST_ROWS = 16  # each with a cut of its own
TOLERANCE = 2e-3  # float32


def cuts_of(length: int, media: Media) -> list[int]:
    """Some of the places where a prompt may be cut: not within an image whose tokens see one another."""
    found = set(range(1, length))
    for item in media.items:
        if item.is_uncut:
            found -= set(range(item.position + 1, item.position + len(item.is_vector)))
    legal = sorted(found)
    return [legal[place] for place in np.linspace(0, len(legal) - 1, min(len(legal), MOST_ROWS)).astype(int)]


@pytest.mark.parametrize("name", list(CASES))
def test_logits_are_transformers_however_a_prompt_is_cut(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    seeing = Seeing(CASES[name], tmp_path_factory.mktemp("logits"))
    text, images = f"w1 w2 {seeing.placeholder} w3 {seeing.placeholder} w4", [WIDE, TALL]
    ids, media = seeing.prompt(text, images)
    assert media is not None
    cuts = cuts_of(len(ids), media)
    made = engine(
        seeing.folder,
        device="cpu",
        load_format="auto",
        dtype="float32",
        max_model_len=LENGTH,
        max_num_seqs=MOST_ROWS,
        max_num_batched_tokens=MOST_ROWS * LENGTH,
        kv_cache_memory=1 << 28,
    )
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    driver = Driver(made, [ids] * len(cuts), sampling, audio=[media] * len(cuts), most=LENGTH)
    driver.step(dict(enumerate(cuts)))
    driver.step({row: len(ids) - cut for row, cut in enumerate(cuts)})
    driver.step(dict.fromkeys(range(len(cuts)), 1))
    (token,) = {tokens[0] for tokens in driver.tokens}
    # transformers' Cohere2 Vision leaves out what its text model multiplies logits by; vLLM's has it.
    scale = seeing.theirs.config.text_config.logit_scale if name == "cohere2-vision" else 1.0
    expected = seeing.logits(text, images, [token]) * scale
    assert len(driver.seen) == 2 * len(cuts)
    found = [(one.logits - expected[one.length - len(ids)]).abs().max() for one in driver.seen]
    assert float(expected.std()) > 0.1 * scale, "the model was to tell tokens apart"
    assert float(torch.stack(found).max()) < TOLERANCE * scale
