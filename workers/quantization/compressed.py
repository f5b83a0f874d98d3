"""The LinearMethod of a compressed-tensors scheme, which depends on how its weights are stored."""

from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.quantization.fp8 import Fp8Linear
from meshlm.workers.quantization.method import LinearMethod
from meshlm.workers.quantization.packed import PackedLinear


def method(scheme: QuantizationScheme) -> LinearMethod:
    """Packed integers, or 8-bit floats."""
    return PackedLinear(scheme) if scheme.weight == "group" else Fp8Linear(scheme)
