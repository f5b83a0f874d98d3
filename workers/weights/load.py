"""Fills a model with weights and reports how far it is."""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from meshlm.protocol.config import Resolved
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers import memory
from meshlm.workers.models.decoder import Attention, Decoder
from meshlm.workers.models.registry import model_class
from meshlm.workers.weights import sources

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DUMMY_STD = 0.02
_PARTS = {
    "q_proj": ("qkv", 0),
    "k_proj": ("qkv", 1),
    "v_proj": ("qkv", 2),
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", 1),
}
_RENAMES = {
    "self_attn.o_proj": "attention.o",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "mlp.down_proj": "mlp.down",
}


def load_model(resolved: Resolved, device: torch.device, seed: int, progress: Callable[[int, int], None]) -> Decoder:
    """The model on its device, in its dtype. `progress` gets bytes done and in all. ProcessFatal."""
    spec, dtype = resolved.spec, DTYPES[resolved.dtype]
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = model_class(spec)(spec, resolved.max_model_len)
    finally:
        torch.set_default_dtype(default)
    memory.check_weights(weight_bytes(model), device)
    model.to_empty(device=device)
    if resolved.load_format == "dummy":
        _fill_dummy(model, seed)
    else:
        _fill(model, resolved, device, progress)
    model.prepare(device, dtype)
    return model.eval()


def _fill_dummy(model: Decoder, seed: int) -> None:
    """Small random weights, the same for the same seed."""
    generator: torch.Generator | None = None
    for name, parameter in model.named_parameters():
        if generator is None:
            generator = torch.Generator(parameter.device).manual_seed(seed)
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, DUMMY_STD, generator=generator)


def _fill(model: Decoder, resolved: Resolved, device: torch.device, progress: Callable[[int, int], None]) -> None:
    slots = dict(model.named_parameters())
    missing = {name: parameter.numel() for name, parameter in slots.items()}
    total = sum(p.numel() * p.element_size() for p in slots.values())
    done = 0
    for name, tensor in sources.tensors(Path(resolved.model_path), resolved.load_format, resolved.spec, device):
        if _take_kv_scale(name, tensor, model):
            continue
        place = _place(name, model)
        if place is None:
            continue
        ours, begin, length = place
        if ours not in slots:
            raise ProcessFatal(f"{resolved.model_path}: tensor {name} does not belong to {resolved.spec.architecture}")
        target = slots[ours][begin : begin + length] if length else slots[ours]
        if target.shape != tensor.shape:
            have, want = tuple(tensor.shape), tuple(target.shape)
            raise ProcessFatal(f"{resolved.model_path}: tensor {name} has shape {have}, the configuration says {want}")
        target.copy_(tensor)
        missing[ours] -= target.numel()
        done += target.numel() * target.element_size()
        progress(done, total)
    incomplete = [name for name, left in missing.items() if left]
    if incomplete:
        raise ProcessFatal(f"{resolved.model_path}: weights are missing for {', '.join(sorted(incomplete)[:3])} ...")


def _place(name: str, model: Decoder) -> tuple[str, int, int] | None:
    """Our parameter, and the rows of it that this tensor fills (length 0: all). None: not needed."""
    spec = model.spec
    name = name.removeprefix("model.")
    if name == "embed_tokens.weight":
        return "embed.weight", 0, 0
    if name == "lm_head.weight":
        return None if spec.tie_word_embeddings else ("head.weight", 0, 0)
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None:
        return ("norm.weight", 0, 0) if name == "norm.weight" else None
    layer, stem, kind = match.groups()
    part = stem.rpartition(".")[2]
    if part in _PARTS:
        module, nth = _PARTS[part]
        sizes = _part_sizes(model, module)
        parent = "attention" if module == "qkv" else "mlp"
        return f"layers.{layer}.{parent}.{module}.{kind}", sum(sizes[:nth]), sizes[nth]
    if stem not in _RENAMES:
        return None
    return f"layers.{layer}.{_RENAMES[stem]}.{kind}", 0, 0


def _take_kv_scale(name: str, tensor: Tensor, model: Decoder) -> bool:
    """A scale of an FP8 cache (k_scale, v_scale of self_attn, its attn or its projections) goes to its layer."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale", name)
    if match is None:
        return False
    if tensor.numel() != 1 or not 0 < float(tensor) < float("inf"):
        raise ProcessFatal(
            f"tensor {name}: one positive number per layer is read, this has shape {tuple(tensor.shape)}"
        )
    attention = model.layers[int(match[1])].attention
    assert isinstance(attention, Attention)
    keys, values = attention.kv_scale
    attention.kv_scale = (float(tensor), values) if match[2] == "k" else (keys, float(tensor))
    return True


def _part_sizes(model: Decoder, module: str) -> tuple[int, ...]:
    spec = model.spec
    if module == "gate_up":
        return (spec.intermediate_size, spec.intermediate_size)
    kv = spec.num_key_value_heads * spec.head_dim
    return (spec.num_attention_heads * spec.head_dim, kv, kv)


def weight_bytes(model: Decoder) -> int:
    """Bytes of all parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
