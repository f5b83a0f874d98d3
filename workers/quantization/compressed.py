"""The LinearMethod of a compressed-tensors scheme, which depends on how its weights are stored."""

from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.quantization.fp8 import Fp8Linear
from meshlm.workers.quantization.int8 import Int8Linear
from meshlm.workers.quantization.method import LinearMethod
from meshlm.workers.quantization.packed import PackedLinear


def method(scheme: QuantizationScheme) -> LinearMethod:
    """Packed integers, integers of 8 bits with rounded activations, or 8-bit floats."""
    if scheme.weight == "group":
        return PackedLinear(scheme)
    return Int8Linear(scheme) if scheme.integers else Fp8Linear(scheme)
