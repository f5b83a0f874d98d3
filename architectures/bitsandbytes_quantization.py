"""Checkpoints of bitsandbytes with 4 bits (NF4, FP4), and the names of the tensors that they have beside a layer's weight."""

from typing import Any

from meshlm.architectures.quantization_keys import names, one_of, only, same
from meshlm.protocol.model import QuantizationScheme, QuantizationSpec

BLOCK = 64  # codes that share a scale
_SETTINGS = (
    "quant_method load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_quant_type bnb_4bit_use_double_quant"
    " bnb_4bit_compute_dtype bnb_4bit_quant_storage llm_int8_threshold llm_int8_skip_modules"
)


def read_bitsandbytes(config: dict[str, Any]) -> QuantizationSpec:
    """quant_method bitsandbytes. llm_int8_threshold means nothing to 4 bits."""
    only(config, _SETTINGS)
    one_of(config, "load_in_8bit", (False, None))
    one_of(config, "_load_in_8bit", (False, None))
    one_of(config, "load_in_4bit", (True,))
    same(config, "load_in_4bit", "_load_in_4bit")
    one_of(config, "bnb_4bit_quant_storage", ("uint8", None))
    kind = one_of(config, "bnb_4bit_quant_type", ("nf4", "fp4"))
    return spec_of(kind, names(config, "llm_int8_skip_modules"), online=False)


def spec_of(kind: str, ignore: tuple[str, ...] = (), *, online: bool = True) -> QuantizationSpec:
    """kind: nf4 or fp4. online: of plain weights, while they are loaded."""
    scheme = QuantizationScheme(
        targets=("Linear",),
        weight="group",
        activation="none",
        bits=4,
        weight_group=BLOCK,
        files="bitsandbytes",
        values="fp4" if kind == "fp4" else "nf4",
        online=online,
    )
    return QuantizationSpec(method="bitsandbytes", schemes=(scheme,), ignore=("lm_head", *ignore))
