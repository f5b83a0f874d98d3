"""The WeightFormat of a compressed-tensors scheme, which depends on how its weights are stored."""

from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.formats.format import WeightFormat
from meshlm.workers.formats.fp8 import Fp8Format
from meshlm.workers.formats.int8 import Int8Format
from meshlm.workers.formats.packed import PackedFormat


def make_format(scheme: QuantizationScheme) -> WeightFormat:
    """Packed integers, integers of 8 bits with rounded activations, or 8-bit floats."""
    if scheme.weight == "group":
        return PackedFormat(scheme)
    return Int8Format(scheme) if scheme.integers else Fp8Format(scheme)
