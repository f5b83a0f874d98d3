"""Models of transformers written as .gguf files, in the form that llama.cpp gives them: its names, orders of rows and metadata."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import quantize
from gguf_models import writer_of
from torch import Tensor

from meshlm.architectures.family import GGUFFamily, Weight
from meshlm.architectures.registry import gguf_family, weights_of
from meshlm.protocol.layers import StateSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.weights.sources import sources

QKV = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}
GATE_UP = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}


def write_model(
    folder: Path,
    path: Path,
    kind: str,
    spec: ModelSpec,
    names: Collection[str],
    keys: Mapping[str, Any],
    more: Mapping[str, Tensor] = {},
    kinds: Mapping[str, gguf.GGMLQuantizationType] = {},
) -> None:
    """The weights of this folder in one file, in float32. kind: general.architecture. names: of transformers' tensors, by which
    llama.cpp has several in one. keys: metadata beside what all files have. more: tensors beside the model's, by llama.cpp's names.
    kinds: of quantised ones."""
    writer = writer_of(path, kind, spec)
    for key, value in keys.items():
        add(writer, key if key.startswith(("xielu.", "tokenizer.")) else f"{kind}.{key}", value)
    known = known_names(kind)
    family = gguf_family({"general.architecture": kind, **{f"{kind}.{key}": value for key, value in keys.items()}})
    assert family is not None
    assert family.gguf is not None
    for name, tensor in (tensors_of(folder, family.gguf, spec, names) | dict(more)).items():
        assert plain(name) in known, f"llama.cpp has no name {name} for a tensor of this model"
        values, quantised = tensor.contiguous().numpy(), kinds.get(name)
        if quantised is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One key of metadata, in the place of what it had."""
    for data in writer.kv_data:
        data.pop(key, None)
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def tensors_of(folder: Path, family: GGUFFamily, spec: ModelSpec, names: Collection[str]) -> dict[str, Tensor]:
    """The tensors of the file."""
    read = {name: source.whole() for name, source in sources(folder, "safetensors", spec, torch.device("cpu"), 0)}
    found: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for weight in weights_of(spec).values():
        if plain(weight.gguf).startswith("xielu."):  # in the metadata
            continue
        tensor = in_file(read[weight.name], weight, family, spec)
        if weight.expert is None and not _stands_beside(weight):
            found[weight.gguf] = tensor
        else:
            stacks.setdefault(weight.gguf, []).append(tensor)
    found |= {name: torch.stack(matrices) for name, matrices in stacks.items()}
    if spec.state is not None and family.kind == "qwen3next":
        found = dict(_by_kind(found, spec.state))
    written = {plain(name) for name in theirs(family.kind, names)}
    packed = {stem: parts for stem, parts in (QKV | GATE_UP | dict(family.packed)).items() if stem in written}
    if spec.state is not None and spec.state.kind == "gated_delta_net":  # layers that attend have three tensors
        packed["attn_qkv"] = tuple(part for part in packed.get("attn_qkv", ()) if "." in part)
    return joined(found, packed)


def _stands_beside(weight: Weight) -> bool:
    """Whether matrices of the model are one tensor (Gemma 3n)."""
    return weight.gguf.startswith(("altup_proj.", "altup_unembd_proj."))


def in_file(tensor: Tensor, weight: Weight, family: GGUFFamily, spec: ModelSpec) -> Tensor:
    """The values of a weight as a file has them, in their order."""
    tensor = tensor + weight.plus if weight.plus else tensor
    turned = weight.gguf.partition(".attn_")[2].startswith(("q.", "k."))
    if family.interleaved_heads and turned and not weight.neighbours[1]:
        halves = tensor.view(-1, 2, spec.head_dim // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    if family.kind == "falcon-h1":
        tensor = tensor * weight.times * (spec.logit_scale if weight.name == "lm_head.weight" else 1.0)
    return _of_state(tensor, plain(weight.gguf), spec, family)


def _of_state(tensor: Tensor, stem: str, spec: ModelSpec, family: GGUFFamily) -> Tensor:
    if family.kind.startswith("qwen35") and spec.state is not None:
        tensor = _tiled(tensor, stem, spec.state)
    if stem == "ssm_a":
        tensor = -tensor.exp()
    if stem == "ssm_norm" and spec.state is not None and spec.state.kind == "mamba2":
        return tensor.view(spec.state.n_groups, -1)
    if stem in ("ssm_a", "ssm_d") and spec.state is not None and spec.state.kind == "mamba2":
        return tensor.unsqueeze(1)
    if stem.startswith(("ssm_conv1d", "shortconv.conv")) and tensor.dim() == 3:
        return tensor.squeeze(1)
    return tensor


def _tiled(tensor: Tensor, stem: str, state: StateSpec) -> Tensor:
    """Value heads of which neighbours belong to different heads of keys."""
    if stem in ("attn_qkv.v", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt", "ssm_conv1d.v"):
        heads = tensor.view(state.n_groups, state.num_heads // state.n_groups, -1, *tensor.shape[1:])
        return heads.transpose(0, 1).reshape(tensor.shape)
    if stem == "ssm_out":
        return _tiled(tensor.t(), "attn_gate", state).t()
    return tensor


def _by_kind(tensors: Mapping[str, Tensor], state: StateSpec) -> Iterator[tuple[str, Tensor]]:
    """The rows of the first product of a gated delta net: all queries, all keys, all values; and the gates in a tensor of their own."""
    each = state.inner // state.n_groups
    for name, tensor in tensors.items():
        if plain(name) != "ssm_in":
            yield name, tensor
            continue
        *qkv, gate = tensor.unflatten(0, (state.n_groups, -1)).split(
            (state.state_size, state.state_size, each, each), dim=1
        )
        yield name.replace("ssm_in", "attn_qkv"), torch.cat([part.flatten(0, 1) for part in qkv])
        yield name.replace("ssm_in", "attn_gate"), gate.flatten(0, 1)


def joined(tensors: Mapping[str, Tensor], packed: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """With those in one tensor that llama.cpp has in one. packed: its stem, and those of the parts."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem = next((whole for whole, parts in packed.items() if plain(name) in parts), None)
        whole = name if stem is None else ".".join((*name.split(".")[:2], stem, name.split(".")[-1]))
        found[whole] = tensor if whole not in found else torch.cat((found[whole], tensor), max(0, tensor.dim() - 2))
    return found


def plain(name: str) -> str:
    """The stem of a tensor's name, without its layer."""
    stem = name.removesuffix(".weight").removesuffix(".bias").removesuffix(".scale")
    return ".".join(stem.split(".")[2:]) if stem.startswith("blk.") else stem


def known_names(kind: str) -> set[str]:
    """The stems that the gguf package knows of this architecture."""
    return {plain(gguf.TENSOR_NAMES[number].format(bid=0)) for number in gguf.MODEL_TENSORS[architecture_of(kind)]}


def theirs(kind: str, names: Collection[str]) -> Iterator[str]:
    """The names that the gguf package gives tensors of transformers."""
    found = gguf.get_tensor_name_map(architecture_of(kind), 5)
    for name in (*names, *(name.removeprefix("transformer.") for name in names)):  # BLOOM's are without it
        if (own := found.get_name(name, (".weight", ".bias"))) is not None:
            yield own


def architecture_of(kind: str) -> gguf.MODEL_ARCH:
    (architecture,) = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind]
    return architecture
