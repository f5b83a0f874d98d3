"""ALiBi (Press et al. 2022): attention with linear biases, in the place of positions."""

import math


def slopes(num_heads: int, bias_max: float = 8.0, scale: float = 1.0) -> tuple[float, ...]:
    """The slope of each head: a geometric sequence that ends with 2 ** -bias_max; where the number of heads is no power of two, that of
    the power below it, and every second number of the one for twice as many heads. scale: what all are multiplied by."""

    def sequence(count: int) -> list[float]:
        return [2.0 ** (-bias_max * (head + 1) / count) for head in range(count)]

    below = 2 ** int(math.log2(num_heads))
    found = sequence(below) + sequence(2 * below)[::2][: num_heads - below]
    return tuple(slope * scale for slope in found)


def mpt_slopes(num_heads: int, bias_max: float) -> tuple[float, ...]:
    """MPT's order where the number of heads is no power of two: every second number of the power above it first."""
    above = 2 ** math.ceil(math.log2(num_heads))
    found = [2.0 ** (-bias_max * (head + 1) / above) for head in range(above)]
    return tuple(found if above == num_heads else [*found[1::2], *found[::2]][:num_heads])
