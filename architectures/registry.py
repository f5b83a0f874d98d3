"""Model families by the name of their architecture. A plug-in adds its own with `register`."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from meshlm.architectures import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from meshlm.architectures.family import Family, Weight
from meshlm.protocol.model import ModelSpec

_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Let models of this architecture be served. ValueError: there is one of that name."""
    if family.architecture in _FAMILIES:
        raise ValueError(f"architecture {family.architecture} is registered already")
    _FAMILIES[family.architecture] = family


def families() -> dict[str, Family]:
    """All families, by architecture."""
    return dict(_FAMILIES)


def family_of(architecture: str) -> Family | None:
    """The family with this name in config.json's `architectures`."""
    return _FAMILIES.get(architecture)


def gguf_families() -> dict[str, Family]:
    """Families by general.architecture of .gguf files: of several that llama.cpp calls by one name, the first registered."""
    found: dict[str, Family] = {}
    for family in _FAMILIES.values():
        if family.gguf is not None:
            found.setdefault(family.gguf.kind, family)
    return found


def gguf_family(fields: Mapping[str, Any]) -> Family | None:
    """The family of a file with this metadata: its kind may be that of dense models and of mixtures of experts."""
    kind = fields.get("general.architecture")
    of_kind = [(family, family.gguf) for family in _FAMILIES.values() if family.gguf and family.gguf.kind == kind]
    experts = bool(fields.get(f"{kind}.expert_count"))
    alike = [family for family, described in of_kind if described.experts == experts]
    return next(iter(alike or [family for family, _ in of_kind]), None)


@cache
def weights_of(spec: ModelSpec) -> dict[str, Weight]:
    """All tensors of a model, by Hugging Face's names."""
    return {weight.name: weight for weight in _FAMILIES[spec.architecture].weights(spec)}


for _module in (
    llama,
    mistral,
    qwen2,
    qwen3,
    gemma2,
    gemma3,
    phi3,
    mixtral,
    qwen2_moe,
    qwen3_moe,
    deepseek_v2,
    deepseek_v3,
):
    register(_module.FAMILY)
