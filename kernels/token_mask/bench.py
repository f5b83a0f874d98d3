"""Masks of grammars on bfloat16 logits, on the GPU that is there.

    python -P -m meshlm.kernels.token_mask.bench [--json FILE]

`of` lines have a mask, in which a token in a hundred may come.
"""

import argparse
from typing import Any

import torch

from meshlm.kernels.measure import microseconds, report
from meshlm.kernels.token_mask.kernel import token_mask

VOCAB = 151936
CASES = [(1, 1), (64, 0), (64, 20), (64, 64), (256, 256)]  # lines, of them with a mask


def bench(lines: int, num: int) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device("cuda")
    logits = torch.randn(lines, VOCAB, device=device, dtype=torch.bfloat16)
    bits = torch.rand(max(1, num), VOCAB // 32, 32, device=device) < 0.01
    shifts = torch.arange(32, device=device, dtype=torch.int64)
    words = (bits.long() << shifts).sum(-1).to(torch.int32)
    which = torch.full((lines,), -1, dtype=torch.int32, device=device)
    which[:num] = torch.arange(num, dtype=torch.int32, device=device)
    us = microseconds(lambda: token_mask(logits, which, words))
    return {"lines": lines, "of": num, "us": round(us, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    arguments = parser.parse_args()
    report((bench(*case) for case in CASES), arguments.json)


if __name__ == "__main__":
    main()
