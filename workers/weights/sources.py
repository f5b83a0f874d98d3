"""Where weights come from: tensors with Hugging Face names, one after the other, whatever the file format."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal

_GGUF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def tensors(path: Path, load_format: str, spec: ModelSpec, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all weights. ProcessFatal names a file that cannot be read."""
    match load_format:
        case "safetensors":
            return _safetensors(path, device)
        case "pt":
            return _pickled(path)
        case "gguf":
            return _gguf(path, spec)
    raise ProcessFatal(f"--load-format {load_format}: not a file format")


def _safetensors(path: Path, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt", device=str(device)) as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ProcessFatal(f"{file}: cannot be read, perhaps cut short ({error})") from None


def _pickled(path: Path) -> Iterator[tuple[str, Tensor]]:
    files = sorted(path.glob("*.bin")) or sorted(path.glob("*.pt"))
    for file in files:
        try:
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise ProcessFatal(f"{file}: cannot be read ({str(error).splitlines()[0]})") from None
        yield from ((name, tensor) for name, tensor in state.items() if isinstance(tensor, Tensor))


def _gguf(path: Path, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Any quantisation that the gguf package decodes, as float32."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    try:
        reader = GGUFReader(path)
        for tensor in reader.tensors:
            name = _gguf_name(tensor.name)
            if name is None:
                continue
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            values = values.reshape([int(size) for size in reversed(tensor.shape.tolist())])
            yield name, _unpermute(name, values, spec)
    except (OSError, ValueError, KeyError, IndexError, NotImplementedError) as error:
        raise ProcessFatal(f"{path}: cannot be read, perhaps cut short ({error})") from None


def _gguf_name(name: str) -> str | None:
    """ggml's tensor name as Hugging Face's; None for tables that we compute ourselves."""
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _GGUF_LAYER:
        return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.{kind}"
    return None


def _unpermute(name: str, values: Tensor, spec: ModelSpec) -> Tensor:
    """llama.cpp stores q and k of the llama family for rotating neighbours; we rotate halves."""
    if spec.architecture not in ("LlamaForCausalLM", "MistralForCausalLM"):
        return values
    heads = {"q_proj": spec.num_attention_heads, "k_proj": spec.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    shape = values.shape
    return values.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
