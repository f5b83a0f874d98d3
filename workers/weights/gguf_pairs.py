"""Tensors of .gguf files that stand there in two, and in Hugging Face's files in one. Parts of gguf_delta.py and gguf_latent.py."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.weights.gguf_source import GGUFTensorSource


def check_shape(source: GGUFTensorSource, name: str, shape: tuple[int, ...]) -> None:
    """ProcessFatal: the tensor of this name has another one."""
    if source.shape != shape:
        raise ProcessFatal(f"tensor {name} has shape {source.shape}; it must have {shape}")


def paired(
    tensors: Iterable[tuple[str, GGUFTensorSource]],
    half: re.Pattern[str],
    join: Callable[[str, Mapping[str, GGUFTensorSource]], tuple[str, Any]],
) -> Iterator[tuple[str, Any]]:
    """All tensors; both halves of a layer as the one that `join` makes of the layer's number and of them; a lone one keeps its name.

    half: matches a half's whole name; its groups `layer` and `which` say of which layer it is, and which of both.
    """
    halves: dict[str, dict[str, tuple[str, GGUFTensorSource]]] = {}
    for name, source in tensors:
        match = half.fullmatch(name)
        if match is None:
            yield name, source
        else:
            halves.setdefault(match["layer"], {})[match["which"]] = name, source
    for layer, found in halves.items():
        if len(found) < 2:
            yield from found.values()
        else:
            yield join(layer, {which: source for which, (_, source) in found.items()})
