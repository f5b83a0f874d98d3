"""The reference of gated_delta/kernel.py and update.py in torch: the gated delta rule (Yang et al. 2024, "Gated Delta Networks").

    S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - exp(g_t) S_(t-1)^T k_t))^T          of each head: S [K, V]
    o_t = S_t^T q_t

with q and k of length 1, q scaled by 1 / sqrt(K), g = rate softplus(a + bias) and beta = sigmoid(b).

In a chunk the corrections depend on one another: with A = tril(beta_i k_i^T k_j exp(G_i - G_j), -1), where G sums up g, they are
(1 + A)^-1 (beta (v - exp(G) S^T k)), a triangular system.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
EPS = 1e-6  # of the squared length of queries and keys


def unit(heads: Tensor, each: int) -> Tensor:
    """heads [t, groups, K] -> [t, groups * each, K] float32: of length 1, and once for each head of values."""
    heads = heads.float()
    return (heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + EPS)).repeat_interleave(each, 1)


def gates(a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """a, b [t, heads], rate, bias float32 [heads] -> g and beta [t, heads], float32."""
    return rate * F.softplus(a.float() + bias), b.float().sigmoid()


def chunk_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """q, k [t, heads, K], v [t, heads, V], g, beta [t, heads], state [heads, V, K] -> o [t, heads, V], and the last state.

    All of one sequence, in float32; q and k normed and scaled, a head of them for each of v."""
    if state is None:
        state = v.new_zeros(v.shape[1], v.shape[2], k.shape[2])
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    out = torch.empty_like(v)
    for begin in range(0, v.shape[1], chunk):
        part = slice(begin, begin + chunk)
        queries, keys, values = q[:, part], k[:, part], v[:, part]
        total, weight = g[part].cumsum(0).t(), beta[part].t()[..., None]
        decay = (total[:, :, None] - total[:, None, :]).tril().exp()
        inner = (weight * (keys @ keys.transpose(1, 2)) * decay).tril(-1)
        known = total.exp()[..., None] * (keys @ state.transpose(1, 2))
        eye = torch.eye(inner.shape[1], dtype=inner.dtype, device=inner.device)
        corrections = torch.linalg.solve_triangular(
            eye + inner, weight * (values - known), upper=False, unitriangular=True
        )
        out[:, part] = total.exp()[..., None] * (queries @ state.transpose(1, 2))
        out[:, part] += (queries @ keys.transpose(1, 2) * decay).tril() @ corrections
        left = (total[:, -1:] - total).exp()[..., None] * keys
        state = total[:, -1].exp()[:, None, None] * state + corrections.transpose(1, 2) @ left
    return out.transpose(0, 1), state


def rule_update(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of n sequences: q, k [n, heads, K], v [n, heads, V], g, beta [n, heads], state [n, heads, V, K] -> o, both."""
    state = g.exp()[..., None, None] * state
    correction = beta[..., None] * (v - (state @ k[..., None])[..., 0])
    state = state + correction[..., None] * k[:, :, None]
    return (state @ q[..., None])[..., 0], state
