"""Numbers as floats of eight bits (OCP 8-bit floating point; `embed_dtype` fp8_e4m3 and fp8_e5m2), without torch. Pure."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from types import MappingProxyType

NAN, SIGN = 0x7F, 0x80


def _rounder(exponent_bits: int, largest: int) -> Callable[[float], int]:
    """To the byte of the nearest number, ties to the even one. largest: the byte of the largest number, or of infinity where there is
    one; what is larger becomes it, as in newer versions of torch."""
    mantissa_bits = 7 - exponent_bits
    bias, ones = (1 << exponent_bits - 1) - 1, 1 << mantissa_bits

    def value(byte: int) -> float:
        exponent, mantissa = divmod(byte, ones)
        if not exponent:
            return math.ldexp(mantissa, 1 - bias - mantissa_bits)
        return math.ldexp(ones + mantissa, exponent - bias - mantissa_bits)

    between = [(value(byte) + value(byte + 1)) / 2 for byte in range(largest)]

    def rounded(number: float) -> int:
        if math.isnan(number):
            return NAN
        size, sign = abs(number), SIGN if math.copysign(1.0, number) < 0 else 0
        byte = bisect_left(between, size)
        if byte < largest and between[byte] == size:
            byte += byte & 1  # halfway
        return sign | byte

    return rounded


ROUNDERS: Mapping[str, Callable[[float], int]] = MappingProxyType(
    {"fp8_e4m3": _rounder(4, 0x7E), "fp8_e5m2": _rounder(5, 0x7C)}
)
