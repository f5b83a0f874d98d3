"""The random numbers of sampling: draw i of a request is a pure function of (seed, i), on every device.

u = mix(seed + (i + 1) * golden) with SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014), as 53 bits in [0, 1). So a
stream that is continued elsewhere, or recomputed after preemption, goes on with the draws it would have made.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 [n] in [0, 1), one for each (seed, output index)."""
    z = seeds + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _A
    z = (z ^ (z >> np.uint64(27))) * _B
    z ^= z >> np.uint64(31)
    found: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found
