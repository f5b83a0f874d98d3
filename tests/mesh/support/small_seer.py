"""A small model that sees, with weights, and transformers' own beside it."""

import io
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from seeing_models import CONFIG, IMAGE, PROCESSOR, seeing_model
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class Seer:
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
        logits = self._computed(prompt + tokens[:-1], files).logits[0]
        return logits[len(prompt) - 1 :].argmax(-1).tolist()  # type: ignore[no-any-return]

    def embedding(self, prompt: list[int], *files: bytes) -> list[float]:
        """The last token's hidden state, of length one."""
        last = self._computed(prompt, files).hidden_states[-1][0, -1]
        return torch.nn.functional.normalize(last, dim=0).tolist()

    def _computed(self, ids: list[int], files: tuple[bytes, ...]) -> Any:
        row = torch.tensor([ids])
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
        self.theirs.model.rope_deltas = None
        types = (row == IMAGE).int()
        with torch.no_grad():
            given = self._images(images=images, return_tensors="pt") if images else {}
            return self.theirs(input_ids=row, mm_token_type_ids=types, output_hidden_states=True, **given)
