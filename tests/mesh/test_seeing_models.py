"""A small model that sees, served whole on the CPU: its answers are transformers' own, and a worker's death changes none of them."""

import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from image_files import data_url
from image_requests import ask, body, cached, fresh, ids_of, part, stream
from PIL import Image
from seeing_models import CONFIG, IMAGE, PROCESSOR, seeing_model
from serving import Serving, serving
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

pytestmark = pytest.mark.mesh
COUNT = 8


class Seeing:
    """The model in its folder, and transformers' own."""

    def __init__(self, folder: Path) -> None:
        self.folder = seeing_model(folder)
        torch.manual_seed(0)
        text = {**CONFIG["text_config"], "initializer_range": 0.2}
        config = transformers.Qwen2VLConfig(**{**CONFIG, "text_config": text})
        whole = transformers.Qwen2VLForConditionalGeneration._from_config(config, attn_implementation="eager")
        self.theirs: Any = whole.eval().float()
        self.theirs.lm_head.weight.data[IMAGE] = 0  # no answer has a placeholder
        self.theirs.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({**CONFIG, "text_config": text, "dtype": "float32"}))
        sizes = {key: value for key, value in PROCESSOR.items() if not key.endswith(("_type", "_class"))}
        self._images = Qwen2VLImageProcessorPil(**sizes)

    def expected(self, prompt: list[int], tokens: list[int], *files: bytes) -> list[int]:
        """The likeliest token behind the prompt, and behind each of these but the last."""
        ids = torch.tensor([prompt + tokens[:-1]])
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
        self.theirs.model.rope_deltas = None
        with torch.no_grad():
            given = self._images(images=images, return_tensors="pt")
            logits = self.theirs(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **given).logits[0]
        return logits[len(prompt) - 1 :].argmax(-1).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def server(model: Seeing) -> Iterator[Serving]:
    with serving(str(model.folder), "--max-model-len", "512", "--dtype", "float32") as found:
        yield found


def test_answers_are_transformers_own(model: Seeing, server: Serving) -> None:
    first, second = fresh(), fresh((150, 40))
    for files in ((first,), (first, second), (second, first)):
        answer = ask(server, "look ", *(part(data_url(one)) for one in files), " what?", count=COUNT, temperature=0)
        prompt, tokens = ids_of(answer)
        assert tokens == model.expected(prompt, tokens, *files)
    assert cached(ask(server, "look ", part(data_url(first)), " what?", count=COUNT, temperature=0)) > 0


def test_a_worker_that_dies_changes_nothing(model: Seeing, server: Serving) -> None:
    image = fresh()
    asked = body("and ", part(data_url(image)), "?", count=64, temperature=0)
    prompt, whole = ids_of(ask(server, "and ", part(data_url(image)), "?", count=64, temperature=0))
    assert whole == model.expected(prompt, whole, image)
    victims = [server.pid("worker")]

    def kill(count: int) -> None:
        if count >= 3 and victims:
            os.kill(victims.pop(), signal.SIGKILL)

    assert stream(server, asked, kill) == whole
    assert not victims
