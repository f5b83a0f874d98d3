"""The scales of bitsandbytes' weights, which may be quantised themselves: several tensors become one. A part of sources.py.

    weight_scale = absmax, or nested_quant_map[absmax] * nested_absmax[block // nested_blocksize] + nested_offset

A JSON object in a tensor of bytes says which it is, and the numbers that no other tensor has.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshlm.architectures.packed_quantization import BLOCK, STATE, stem_of
from meshlm.architectures.quantization import scheme_of
from meshlm.kernels.packed_gemm.reference import TABLES
from meshlm.protocol.model import QuantizationScheme, QuantizationSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.weights.source import Mapped, Source

_PLAIN, _NESTED = ("absmax", "quant_map"), ("nested_absmax", "nested_quant_map")


def with_scales(tensors: Iterable[tuple[str, Source]], quantization: QuantizationSpec) -> Iterator[tuple[str, Source]]:
    """The tensors, with a weight_scale in the place of each weight's state. ProcessFatal names what is missing or wrong."""
    states: dict[str, dict[str, Tensor]] = {}
    for name, source in tensors:
        stem, last = stem_of(name)
        scheme = scheme_of(quantization, stem)
        if scheme is None or scheme.online or not last.startswith("weight."):
            yield name, source
            continue
        part = last.removeprefix("weight.").removeprefix("quant_state.")
        state = states.setdefault(stem, {})
        state["state" if part.startswith(STATE) else part] = source.whole().cpu()
        found = _scales(stem, state, scheme)
        if found is not None:
            del states[stem]
            yield f"{stem}.weight_scale", Mapped(found)
    for stem, state in states.items():
        missing = next(part for part in ("state", *_PLAIN, *_NESTED) if part not in state)
        named = f"quant_state.{STATE}..." if missing == "state" else missing
        raise ProcessFatal(f"1 tensor missing: {stem}.weight.{named}")


def _scales(stem: str, state: dict[str, Tensor], scheme: QuantizationScheme) -> Tensor | None:
    """float32 [blocks]; None while parts are to come."""
    if "state" not in state or any(part not in state for part in _PLAIN):
        return None
    said = _settings(stem, state["state"])
    if said.get("quant_type") != scheme.values or said.get("blocksize") != BLOCK:
        raise ProcessFatal(
            f"{stem}.weight: its state says {said.get('quant_type')} in blocks of {said.get('blocksize')}; config.json says "
            f"{scheme.values}, in blocks of {BLOCK}"
        )
    if not torch.allclose(state["quant_map"].float(), torch.tensor(TABLES[scheme.values]), atol=1e-4):
        raise ProcessFatal(f"tensor {stem}.weight.quant_map holds other numbers than those of {scheme.values}")
    absmax = state["absmax"]
    if absmax.dtype != torch.uint8:
        return absmax.float().flatten()
    if any(part not in state for part in _NESTED):
        return None
    size = int(said.get("nested_blocksize", 256))
    nested = state["nested_absmax"].float().flatten().repeat_interleave(size)[: absmax.numel()]
    if len(nested) != absmax.numel():
        raise ProcessFatal(f"tensor {stem}.weight.nested_absmax has {len(state['nested_absmax'])} numbers, too few")
    values = state["nested_quant_map"].float()[absmax.flatten().long()]
    return values * nested + float(said.get("nested_offset", 0.0))


def _settings(stem: str, data: Tensor) -> dict[str, Any]:
    try:
        found = json.loads(bytes(data.to(torch.uint8).tolist()).decode())
    except ValueError as error:
        raise ProcessFatal(f"{stem}.weight: its quant_state cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise ProcessFatal(f"{stem}.weight: its quant_state is no object")
    return found
