"""Model families by the name of their architecture. A plug-in adds its own with `register`."""

from functools import cache

from meshlm.architectures import gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3
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
    """By general.architecture. Of several families that llama.cpp calls by one name, the first registered."""
    found: dict[str, Family] = {}
    for family in _FAMILIES.values():
        if family.gguf is not None:
            found.setdefault(family.gguf.kind, family)
    return found


@cache
def weights_of(spec: ModelSpec) -> dict[str, Weight]:
    """All tensors of a model, by Hugging Face's names."""
    return {weight.name: weight for weight in _FAMILIES[spec.architecture].weights(spec)}


for _family in (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY, gemma2.FAMILY, gemma3.FAMILY, phi3.FAMILY):
    register(_family)
