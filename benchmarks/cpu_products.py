"""One row times one packed weight with rounded activations, by the type of the weight: one thread, weights in the cache.

    python -P benchmarks/cpu_products.py

So what counts is arithmetic, not memory, and other work on the machine moves the best of 3,000 calls little. A call of one panel is
taken off. Codes and scales are random bytes of which no scale becomes a subnormal number.
"""

import json
import time

import torch

from meshlm.kernels.cpu import packed
from meshlm.kernels.cpu.library import call

TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
OUTPUTS, INPUTS, CALLS = 512, 768, 3000


def best_us(weight: torch.Tensor, outputs: int) -> float:
    x, out, best = torch.randn(1, INPUTS), torch.empty(1, OUTPUTS), float("inf")
    arguments = (x.data_ptr(), weight.data_ptr(), None, out.data_ptr(), 1, outputs, INPUTS)
    for _ in range(CALLS):
        begun = time.perf_counter()
        call().meshlm_linear(*arguments)
        best = min(best, time.perf_counter() - begun)
    return best * 1e6


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for name, number in TYPES.items():
        times = {}
        for kind, rounded in (("rounded", True), ("exact", False)):
            form = packed.form_of(number, rounded=rounded)
            assert form is not None
            forms = [form] * (OUTPUTS // packed.WIDTH)
            weight = torch.randint(32, 64, (packed.packed_bytes(forms, INPUTS),), dtype=torch.uint8)
            packed.write_table(weight, forms, INPUTS, rounded=rounded)
            times[kind] = round(best_us(weight, OUTPUTS) - best_us(weight, packed.WIDTH), 1)
        found[name] = times
    print(json.dumps(found))


if __name__ == "__main__":
    main()
