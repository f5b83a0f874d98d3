"""A small model that sees, with weights, and transformers' own beside it."""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import transformers
from PIL import Image
from seeing_models import CONFIG, IMAGE, PROCESSOR, VIDEO, seeing_model
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from meshlm.mediaproc.video_processors import load_video_processor


class Seer:
    """The model in its folder, and transformers' own."""

    def __init__(self, folder: Path) -> None:
        self.folder = seeing_model(folder)
        torch.manual_seed(0)
        text = {**CONFIG["text_config"], "initializer_range": 0.2}
        config = transformers.Qwen2VLConfig(**{**CONFIG, "text_config": text})
        whole = transformers.Qwen2VLForConditionalGeneration._from_config(config, attn_implementation="eager")
        self.theirs: Any = whole.eval().float()
        self.theirs.lm_head.weight.data[IMAGE : VIDEO + 1] = 0  # no answer has a placeholder
        self.theirs.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({**CONFIG, "text_config": text, "dtype": "float32"}))
        sizes = {key: value for key, value in PROCESSOR.items() if not key.endswith(("_type", "_class"))}
        self._images, self._videos = Qwen2VLImageProcessorPil(**sizes), load_video_processor(str(folder))

    def expected(self, prompt: list[int], tokens: list[int], *files: bytes) -> list[int]:
        """The likeliest token behind the prompt, and behind each of these but the last."""
        return self._logits(prompt, tokens, files).argmax(-1).tolist()

    def lag(self, prompt: list[int], tokens: list[int], *files: bytes, videos: Sequence[bytes]) -> float:
        """How far the logit of any of these tokens is from the largest. videos: of so few frames that all are taken."""
        logits = self._logits(prompt, tokens, files, videos)
        chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        return float((logits.max(-1).values - chosen).max())

    def embedding(self, prompt: list[int], *files: bytes) -> list[float]:
        """The last token's hidden state, of length one."""
        last = self._computed(prompt, files).hidden_states[-1][0, -1]
        return torch.nn.functional.normalize(last, dim=0).tolist()

    def _logits(
        self, prompt: list[int], tokens: list[int], files: Sequence[bytes], videos: Sequence[bytes] = ()
    ) -> torch.Tensor:
        """[tokens, vocabulary]"""
        logits = self._computed(prompt + tokens[:-1], files, videos).logits[0]
        return logits[len(prompt) - 1 :]  # type: ignore[no-any-return]

    def _computed(self, ids: list[int], files: Sequence[bytes], videos: Sequence[bytes] = ()) -> Any:
        row = torch.tensor([ids])
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
        clips = [np.stack([frame.to_ndarray(format="rgb24") for frame in frames_of(data)]) for data in videos]
        self.theirs.model.rope_deltas = None
        types = (row == IMAGE).int() + 2 * (row == VIDEO).int()
        with torch.no_grad():
            given: dict[str, Any] = {}
            if images:
                given |= self._images(images=images, return_tensors="pt")
            if clips:
                given |= self._videos(videos=clips, do_sample_frames=False, return_tensors="pt")
            return self.theirs(input_ids=row, mm_token_type_ids=types, output_hidden_states=True, **given)


def frames_of(data: bytes) -> Iterator[av.VideoFrame]:
    """All frames of a video."""
    with av.open(io.BytesIO(data), "r") as container:
        yield from container.decode(video=0)
