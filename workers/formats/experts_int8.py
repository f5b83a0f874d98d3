"""Experts of a plain checkpoint, quantised to 8-bit integers while they are loaded (--quantization experts_int8, as in vLLM).

    q = round(w / s)        s = max |w| / 127 of an output; activations stay as they are

Codes are kept as q + 128, a form of packed weights: a GPU decodes what it multiplies (kernels/packed_experts), a CPU has the values.
"""

from torch import Tensor

from meshlm.kernels.quantise_int8.reference import quantise
from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.formats.format import Encode
from meshlm.workers.formats.packed import PackedFormat


class ExpertsInt8Format(PackedFormat):
    """A scale for each output, whose inputs are one group."""

    def __init__(self, scheme: QuantizationScheme) -> None:
        super().__init__(scheme)
        self.encode: Encode | None = encode


def encode(values: Tensor) -> dict[str, Tensor]:
    """Floats [outputs, inputs] -> uint8 codes [outputs, inputs] and float32 scales [outputs, 1]."""
    codes, scales, _ = quantise(values, True)
    return {"weight": (codes.short() + 128).byte(), "weight_scale": scales}
