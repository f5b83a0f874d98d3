"""The records of gated delta nets: decodes beside a copy of their states, prompts by their products in chunks. Sizes of
Qwen3-Next-80B-A3B, which are Qwen3.5's as well."""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.gated_delta import reference
from meshlm.kernels.gated_delta.kernel import CHUNK, chunk_rule
from meshlm.kernels.gated_delta.update import rule_update
from meshlm.kernels.op import Case, Launch, Op
from meshlm.kernels.states import StateStep

Sizes = tuple[int, int, int, int]  # groups, heads, K, V
QWEN3_NEXT, SMALL, PAGE = (16, 32, 128, 128), (1, 2, 32, 64), 1056


def _make(
    dtype: torch.dtype, device: torch.device, counts: tuple[int, ...], sizes: Sizes = QWEN3_NEXT, page: int = PAGE,
    kept: torch.dtype | None = None,
) -> Launch:  # fmt: skip
    """kept: the dtype of states."""
    groups, heads, numbers, width = sizes
    step = StateStep(counts, page, device)
    q, k = (torch.randn(2, step.tokens, groups, numbers, device=device) * 0.7).to(dtype).unbind()
    v = (torch.randn(step.tokens, heads, width, device=device) * 0.7).to(dtype)
    a, b = torch.randn(2, step.tokens, heads, device=device).to(dtype).unbind()
    rate, bias = -torch.rand(heads, device=device) * 4, torch.randn(heads, device=device)
    state, out = step.states(heads, width, numbers, dtype=kept or dtype), torch.empty_like(v)
    query, key = reference.unit(q, heads // groups) * numbers**-0.5, reference.unit(k, heads // groups)
    g, beta = reference.gates(a, b, rate, bias)

    def of_one(part: slice, before: Tensor | None) -> Tensor:
        return reference.chunk_rule(query[part], key[part], v[part].float(), g[part], beta[part], before)[0]

    theirs: dict[str, Callable[[], object]] = {}
    if len(counts) == 1 and find_spec("fla") is not None:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

        queries, keys = (one.repeat_interleave(heads // groups, 1)[None] for one in (q, k))
        inputs = queries, keys, v[None], (rate * F.softplus(a.float() + bias))[None], b.float().sigmoid()[None]
        theirs["flash_linear_attention"] = lambda: chunk_gated_delta_rule(
            *inputs, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
    flop = 2 * heads * step.tokens * (CHUNK * (3 * numbers + 2 * width) + 3 * numbers * width)
    given = q, k, v, a, b, rate, bias, state, out
    return step.launch((rule_update, chunk_rule), given, of_one, heads, flop, theirs)


DECODES: list[Case] = [
    ((1,) * n, QWEN3_NEXT, PAGE, kept) for kept, n in product((torch.bfloat16, torch.float32), (1, 16, 64, 256))
]
PROMPTS: list[Case] = [((256,),), ((2048,),), ((2048,) * 4,), ((8192,),)]
OPS = (
    Op("rule_update", _make, [((1, 1, 1), SMALL, 48), ((1,), (2, 2, 36, 72), 48)], DECODES, near=2),
    Op("chunk_rule", _make, [((40, 3, 100), SMALL, 48), ((90,), (2, 2, 36, 72), 48)], PROMPTS, near=2),
)
