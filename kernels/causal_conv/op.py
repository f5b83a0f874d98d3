"""The records of causal convolutions: decodes and prompts, with channels of Bamba-9B and Nemotron-H-8B."""

import torch
from torch import Tensor

from meshlm.kernels.causal_conv import reference
from meshlm.kernels.causal_conv.kernel import causal_conv
from meshlm.kernels.op import Case, Launch, Op
from meshlm.kernels.states import StateStep

KERNEL = 4


def _make(dtype: torch.dtype, device: torch.device, counts: tuple[int, ...], channels: int, page: int = 1056) -> Launch:
    """counts: tokens of each request; of one each it has a state already. Lines are parts of wider ones."""
    step = StateStep(counts, page, device)
    x = torch.randn(step.tokens, channels + 5, device=device).to(dtype)[:, 2:-3]
    weight, bias = (
        torch.randn(channels, KERNEL, device=device).to(dtype),
        torch.randn(channels, device=device).to(dtype),
    )
    state = step.states(channels, KERNEL - 1, dtype=dtype)

    def run() -> Tensor:
        return causal_conv(x, weight, bias, state, step.at, step.num_decodes, step.pieces, page)

    def expected() -> Tensor:
        before = step.before(state, channels)
        return torch.cat(
            [reference.causal_conv(x[part], weight, bias, one)[0] for part, one in zip(step.parts, before, strict=True)]
        )

    return Launch(run, expected, 2 * step.tokens * channels * dtype.itemsize)


MODELS = 8448, 10240
COUNTS = (1,) * 64, (2048,), (2048,) * 4
OF_MODELS: list[Case] = [(counts, channels) for channels in MODELS for counts in COUNTS]
OPS = (Op("causal_conv", _make, [((1, 1, 1), 37, 48), ((40, 3, 100), 50, 48)], OF_MODELS, near=2),)
