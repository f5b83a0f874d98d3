"""Encoders of images, videos and sounds: transformers' own modules, with the checkpoint's weights by the checkpoint's names.

The whole model is made on the meta device, without its text part; what is left (tower, projector) gets memory and weights. All of a
model's code between an item's tensors and the vectors that stand in the prompt is one method for each modality, `get_image_features`
among them: tiles, windows, merging, unpadding.
"""

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshlm.protocol.config import Resolved
from meshlm.protocol.media import Modality
from meshlm.protocol.media_spec import MediaSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.model_files.checkpoint_files import is_needless
from meshlm.workers.media.features import features_of
from meshlm.workers.media.tensors import MediaError
from meshlm.workers.models.transformers.config import in_one_line, quiet
from meshlm.workers.weights.load import default_dtype
from meshlm.workers.weights.sources import encoder_sources

_TEXT_PARTS = ("language_model", "text_model")
_OF_SOUND = re.compile(r"(model\.)?(audio_tower|embed_audio)\..*")
_NOT_NAMED = re.compile(
    r"^(?:thinker\.)?model\.|^thinker\.|(?<=vision_tower\.)vision_model\.|(?<=embed_vision\.)multimodal_embedder\."
)
"""Files of some versions of transformers have these in the names of tensors, and others, or its modules, have not."""
_MODULES = {"vision_embedder": "embed_vision", "mlp_AR": "projector"}
"""By the name that files have: the module's."""
_OWN_ATTENTION = ("gemma4_audio",)  # model_type of towers
ENCODE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
"""What transformers' code raises for tensors that are not a processor's."""


class MediaEncoder:
    """`width`: numbers of a vector, those for deepstack's layers behind the one for the embedding."""

    def __init__(self, resolved: Resolved, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        """ProcessFatal."""
        spec = resolved.spec.media
        assert spec is not None
        self.spec, self.dtype, self.device, self._seed = spec, dtype, device, seed
        self.width = spec.hidden_size * (1 + spec.deepstack)
        self.module = _made(spec, dtype, device, seed)
        self._features = {one: features_of(getattr(self.module, "model", self.module), one) for one in spec.modalities}
        self._takes = {one: _taken_by(method) for one, method in self._features.items()}
        self.load(resolved)

    def load(self, resolved: Resolved) -> None:
        """Reads the weights into the tensors that are there. ProcessFatal names a tensor that is missing, or not the encoder's."""
        if resolved.load_format == "dummy":
            return
        slots = {_slot(name): value for name, value in self.module.state_dict(keep_vars=True).items()}
        left, hears = set(slots), Modality.AUDIO in self.spec.modalities
        where = resolved.weights_url or resolved.model_path
        with torch.no_grad():
            for name, source in encoder_sources(resolved, self.device):
                own = _slot(name)
                if own in slots:
                    if tuple(source.shape) != tuple(slots[own].shape):
                        shapes = f"{list(source.shape)}, and config.json says {list(slots[own].shape)}"
                        raise ProcessFatal(f"{where}: tensor {name} is of shape {shapes}")
                    slots[own].copy_(source.whole())
                    left.discard(own)
                elif not is_needless(name) and (hears or not _OF_SOUND.fullmatch(name)):
                    raise ProcessFatal(f"{where}: the encoder of {self.spec.architecture} has no tensor {name}")
        if left:
            raise ProcessFatal(f"{where}: tensor {min(left)} of the encoder is missing")

    def arguments(self, modality: Modality, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that the encoder reads. MediaError where one is missing, or holds no numbers."""
        takes = self._takes[modality]
        found = {name: value for name, value in tensors.items() if name in takes}
        for name, needed in takes.items():
            if needed and name not in found:
                raise MediaError(f"the tensor {name} is missing, which {self.spec.architecture} needs")
        for name, value in found.items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise MediaError(f"the tensor {name} has numbers that are not finite")
        return found

    def encode(self, modality: Modality, items: list[dict[str, Tensor]], num_vectors: int) -> list[Tensor]:
        """The vectors [num_vectors, width] of each of some items of a modality and equal shapes. MediaError."""
        first = items[0]
        joined = {name: torch.cat([item[name] for item in items]).to(self.device) for name in first}
        given = {
            name: value.to(self.dtype) if value.is_floating_point() else value.long() if value.dtype == torch.int32 else value
            for name, value in joined.items()
        }  # fmt: skip
        try:
            with torch.inference_mode():
                out = self._features[modality](**given, return_dict=True)
        except ENCODE_ERRORS as error:
            if isinstance(error, getattr(torch, "AcceleratorError", ())):  # the device computes nothing any more
                raise
            raise MediaError(f"the model's encoder refuses it ({in_one_line(error)})") from None
        parts = [_lines(out if isinstance(out, Tensor) else out.pooler_output)]
        if self.spec.deepstack:
            parts += [_lines(one) for one in out.deepstack_features]
        vectors = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if tuple(vectors.shape) != (len(items) * num_vectors, self.width):
            count, width = len(vectors) // len(items), vectors.shape[-1]
            raise MediaError(
                f"the encoder gives {count} vectors of {width} numbers, the prompt has room for {num_vectors} of {self.width}"
            )
        return list(vectors.to(self.dtype).split(num_vectors))


def _taken_by(method: Any) -> dict[str, bool]:
    """The names of its arguments, and whether it needs them."""
    parameters = inspect.signature(method).parameters.values()
    return {one.name: one.default is one.empty for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD}


def _slot(name: str) -> str:
    """The name of a tensor of a file or of a module, as both are called here."""
    first, dot, rest = _NOT_NAMED.sub("", name).partition(".")
    return f"{_MODULES.get(first, first)}{dot}{rest}"


def _lines(found: Tensor | Iterable[Tensor]) -> Tensor:
    """[vectors, hidden], of one tensor or of one for each item."""
    each = [found] if isinstance(found, Tensor) else list(found)
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in each])


def _attention(values: dict[str, Any]) -> Any:
    """transformers' attention of each part of the model of this config.json: torch's, but for towers that have their own."""
    kind = (values.get("audio_config") or {}).get("model_type")
    return {"": "sdpa", "audio_config": "eager"} if kind in _OWN_ATTENTION else "sdpa"


def _made(spec: MediaSpec, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """The model without its parts for text and for what it does not take here, its weights by chance. ProcessFatal."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    quiet()
    values = json.loads(spec.config)
    if "audio_config" in values and Modality.AUDIO not in spec.modalities:
        values["audio_config"] = None
    try:
        kind = getattr(transformers, spec.architecture)
        config = kind.config_class.from_dict(values)
        with torch.device("meta"), default_dtype(dtype):
            module = kind._from_config(config, attn_implementation=_attention(values), dtype=dtype)
    except (*ENCODE_ERRORS, StrictDataclassError) as error:
        raise ProcessFatal(
            f"{spec.architecture}: transformers cannot make its encoder ({in_one_line(error)})"
        ) from None
    module.lm_head = nn.Identity()
    inner = getattr(module, "model", module)
    for name in _TEXT_PARTS:
        if hasattr(inner, name):
            setattr(inner, name, nn.Identity())
    module.to_empty(device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        for one in module.modules():
            if hasattr(one, "_is_hf_initialized"):
                one._is_hf_initialized = False
        module.initialize_weights()  # and the tables that files do not have
    return module.eval().requires_grad_(requires_grad=False)
