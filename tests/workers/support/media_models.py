"""Small models that see, with random weights: transformers' real processors, transformers' own model, and items as the media process
makes them: a processor is given an item's placeholder alone, and the ids that it gives stand for the item."""

import hashlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from media_cases import Case
from media_processors import IDS, tokenizer
from small_models import SMALL

from meshlm.protocol.media import Media, MediaItem, MediaTensor, Modality

Image: Any = pytest.importorskip("PIL.Image", reason="Pillow is what processors read images with")
LENGTH = 256
_NOT_TENSORS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class Seeing:
    """A model in a folder, transformers' own beside it, and prompts with images for both."""

    def __init__(self, case: Case, folder: Path) -> None:
        import transformers

        torch.manual_seed(0)
        self.case, self.folder = case, folder
        text = {**SMALL, "max_position_embeddings": LENGTH, "initializer_range": 0.2, **case.text}
        names = dict.fromkeys(case.sees, IDS[case.vector])
        config = getattr(transformers, case.config)(text_config=text, vision_config=case.vision, **names, **case.more)
        whole = getattr(transformers, case.architecture)._from_config(config, attn_implementation="eager")
        self.theirs = whole.eval().float()
        self.theirs.get_input_embeddings().weight.data *= 0.1
        self.theirs.get_output_embeddings().weight.data[IDS[case.vector]] = (
            0  # no answer has a placeholder, for which transformers would want an image
        )
        for name, parameter in self.theirs.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                parameter.data += torch.randn_like(parameter) * 0.1
        self.theirs.save_pretrained(folder)
        words = tokenizer()
        self.processor, self._words = case.processor(words), words
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))

    @property
    def placeholder(self) -> str:
        """What a chat template renders for an image."""
        return self.case.placeholder

    def item(self, image: Any) -> MediaItem:
        """As the media process leaves it in its file."""
        out = self.given(self.placeholder, [image])
        ids = out["input_ids"][0].numpy().astype(np.int32)
        values = {
            name: value.numpy() for name, value in out.items() if name not in _NOT_TENSORS and torch.is_tensor(value)
        }
        digest = hashlib.sha256(b"".join(value.tobytes() + repr(value.shape).encode() for value in values.values()))
        path, data, tensors = self.folder / f"{digest.hexdigest()}.media", b"", []
        for name, value in values.items():
            tensors.append(MediaTensor(name, str(value.dtype), value.shape, len(data)))  # type: ignore[arg-type]
            data += value.tobytes()
        path.write_bytes(data)
        is_vector = (ids == IDS[self.case.vector]).astype(np.uint8).tobytes()
        grid = (1, 1, is_vector.count(1))
        if self.case.merge:
            frames, rows, columns = values["image_grid_thw"][0].tolist()
            grid = frames, rows // self.case.merge, columns // self.case.merge
        return MediaItem(
            Modality.IMAGE,
            digest.digest(),
            ids.tobytes(),
            is_vector,
            -1,
            grid,
            str(path),
            tuple(tensors),
            is_uncut=self.case.uncut,
        )

    def prompt(self, text: str, images: list[Any]) -> tuple[list[int], Media | None]:
        """The ids of a text with placeholders, as the detokenizer expands it: they are the processor's own of the whole prompt."""
        ids: list[int] = []
        items = []
        waiting = [self.item(image) for image in images]
        for part in text.replace(self.placeholder, f" {self.placeholder} ").split():
            if part != self.placeholder:
                ids += self._words(part, add_special_tokens=False)["input_ids"]
                continue
            item = waiting.pop(0)
            items.append(
                MediaItem(**{name: getattr(item, name) for name in item.__struct_fields__} | {"position": len(ids)})
            )
            ids += np.frombuffer(item.replacement, np.int32).tolist()
        assert ids == self.given(text, images)["input_ids"][0].tolist()
        return ids, Media(tuple(items)) if items else None

    def given(self, text: str, images: list[Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, about transformers
            return self.processor(text=[text], images=images or None, return_tensors="pt")

    def logits(self, text: str, images: list[Any], tokens: list[int]) -> torch.Tensor:
        """transformers' own of a prompt, as its processor gives it, and these tokens behind: [1 + tokens, vocab]."""
        out = dict(self.given(text, images))
        length = out["input_ids"].shape[1]
        for name in _NOT_TENSORS:
            if name in out:
                value = (
                    torch.tensor([tokens])
                    if name == "input_ids"
                    else torch.full((1, len(tokens)), int(name == "attention_mask"))
                )
                out[name] = torch.cat((out[name], value.to(out[name].dtype)), dim=1)
        for one in (self.theirs, getattr(self.theirs, "model", self.theirs)):
            if hasattr(one, "rope_deltas"):
                one.rope_deltas = None
        with torch.no_grad():
            found: torch.Tensor = self.theirs(**out).logits[0, length - 1 :]
        return found


def picture(seed: int, width: int, height: int) -> Any:
    """Of colours that vary with the place: no two are alike."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
