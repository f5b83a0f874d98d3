"""The record of llama.cpp's samplers: lines, those of them that have some, and tokens of each. With none it is what other steps pay."""

import numpy as np
import torch

from meshlm.kernels.llama_samplers.kernel import llama_samplers
from meshlm.kernels.llama_samplers.reference import Chain, repeat_less, truncate
from meshlm.kernels.op import Launch, Op
from meshlm.kernels.penalties.kernel import workspace

VOCAB = 151936
CHAIN = Chain(top_n_sigma=2.0, top_k=40, typical_p=0.9, top_p=0.95, min_p=0.05)
DRY = (0.8, 1.75, 2, 160)  # multiplier, base, allowed length, longest repetition


def _make(dtype: torch.dtype, device: torch.device, lines: int, num: int, length: int, vocab: int = VOCAB) -> Launch:
    # Each logit once: the reference and the kernel have other sums, and would cut between equal ones at other places.
    logits = torch.stack([torch.randperm(vocab) for _ in range(lines)]).to(device) / vocab * 16
    logits = logits.to(dtype)
    tokens = torch.randint(0, 7, (lines, max(16, length)), dtype=torch.int32, device=device)
    rows = torch.arange(lines, dtype=torch.int32, device=device)
    columns, own = (rows, torch.full_like(rows, length - 1), rows + 1), rows < num
    multiplier, base, allowed, longest = DRY
    values = {
        "num_prompt_tokens": 0, "dry_multiplier": multiplier, "dry_base": base, "dry_allowed_length": allowed,
        "dry_longest": longest, "dry_last_n": np.iinfo(np.int32).max, "chain_top_k": CHAIN.top_k, "chain_top_p": CHAIN.top_p,
        "chain_min_p": CHAIN.min_p, **CHAIN._asdict(),
    }  # fmt: skip
    off = {"dry_multiplier": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0}
    state = {}
    for name, value in values.items():  # of the dtypes that a step's columns have
        kind = torch.int32 if isinstance(value, int) else torch.float32
        theirs = torch.full_like(own, off.get(name, value), dtype=kind)
        state[name] = torch.where(own, torch.full_like(own, value, dtype=kind), theirs)
    state["seed"] = torch.zeros(lines, 2, dtype=torch.int32, device=device)
    breakers = torch.zeros(lines, -(-vocab // 32), dtype=torch.int32, device=device)
    counts = workspace(lines, vocab, device)

    def run() -> torch.Tensor:
        llama_samplers(logits, columns, None, state, breakers, tokens, counts)
        return logits

    def expected() -> torch.Tensor:
        found = logits.clone()
        for line, text in zip(found[:num], tokens[:num, :length], strict=True):
            repeat_less(line, text, torch.zeros_like(text, dtype=torch.bool), DRY)
            truncate(line, CHAIN, 0.0)
        return found

    return Launch(run, expected)


OPS = (
    Op(
        "llama_samplers", _make, [(3, 2, 40, 101), (70, 3, 9, 64)],
        [(1, 0, 1), (256, 0, 1), (1, 1, 1024), (64, 1, 1024), (64, 64, 4096)], dtypes=(torch.float32,),
    ),
)  # fmt: skip
