"""Penalties against the same in torch, on the GPU that is there.

    python -P -m meshlm.kernels.penalties.bench [--json FILE]

Logits are bfloat16. `of` rows of the batch have penalties, with so many tokens; "none" is what every other step pays for the launch.
"""

import argparse
from typing import Any

import torch

from meshlm.kernels.measure import microseconds, report
from meshlm.kernels.penalties.kernel import Edits, Penalties, penalise, workspace

VOCAB = 151936
CASES = [  # lines, of them with penalties, tokens of each
    (1, 0, 0),
    (256, 0, 0),
    (1, 1, 1024),
    (1, 1, 32768),
    (64, 64, 1024),
    (256, 1, 4096),
    (256, 256, 1024),
    (256, 256, 4096),
]


def bench(lines: int, num: int, length: int) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device("cuda")
    logits = torch.randn(lines, VOCAB, device=device, dtype=torch.bfloat16)
    tokens = torch.randint(0, VOCAB, (lines, max(16, length)), dtype=torch.int32, device=device)
    rows = torch.arange(lines, dtype=torch.int32, device=device)
    columns = (rows, torch.full_like(rows, length - 1), rows + 1)
    penalised = (rows < num).float()
    state = Penalties(1.0 + 0.001 * penalised, 0.001 * penalised, 0.001 * penalised)
    nothing = torch.zeros(lines, 16, dtype=torch.int32, device=device)
    edits = Edits(torch.zeros_like(rows), nothing, nothing.float(), nothing)
    prompts, counts = torch.full_like(rows, length // 2), workspace(lines, VOCAB, device)

    def run() -> None:
        penalise(logits, columns, None, state, edits, prompts, tokens, counts)

    result: dict[str, Any] = {"lines": lines, "of": num, "tokens": length, "us": round(microseconds(run), 1)}
    if num:
        ids = tokens[:num, :length].long()
        ones = torch.ones(ids.shape, device=device)

        def by_torch() -> None:
            said = torch.zeros(num, VOCAB, device=device).scatter_add_(1, ids, ones)
            part = logits[:num].float()
            part = torch.where(said > 0, torch.where(part > 0, part / 1.001, part * 1.001), part)
            logits[:num] = (part - 0.001 * said - 0.001 * (said > 0)).to(logits.dtype)

        result["torch_us"] = round(microseconds(by_torch, 5), 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    arguments = parser.parse_args()
    report((bench(*case) for case in CASES), arguments.json)


if __name__ == "__main__":
    main()
