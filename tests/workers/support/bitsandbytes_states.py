"""What bitsandbytes writes of a weight of 4 bits, and the numbers that it stands for."""

import json
from typing import Any

import torch
from torch import Tensor

from meshlm.kernels.packed_gemm.reference import TABLES

CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}


def state_of(weight: Tensor, kind: str, *, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """What bitsandbytes' `QuantState.as_dict(packed=True)` holds, with the codes; and the values."""
    table = torch.tensor(TABLES[kind])
    blocks = weight.flatten().view(-1, 64)
    absmax = blocks.abs().amax(1)
    said: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    found = {"quant_map": table}
    if nested:
        nested_map = torch.linspace(-1, 1, 256)
        offset = float(absmax.mean())
        parts = (absmax - offset).split(256)
        scales = torch.stack([part.abs().max() for part in parts])
        each = scales.repeat_interleave(256)[: len(absmax)]
        codes = ((absmax - offset) / each)[:, None].sub(nested_map).abs().argmin(1)
        found |= {"absmax": codes.to(torch.uint8), "nested_absmax": scales, "nested_quant_map": nested_map}
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        absmax = nested_map[codes] * each + offset
    else:
        found["absmax"] = absmax.clone()
    numbers = (blocks / absmax[:, None])[..., None].sub(table).abs().argmin(-1)
    values = (table[numbers] * absmax[:, None]).view(weight.shape)
    flat = numbers.flatten().to(torch.uint8)
    found["codes"] = (flat[::2] << 4 | flat[1::2])[:, None]
    found[f"quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    return found, values
