"""The CPU kernels as functions of torch tensors. Shapes and formulas: source.c. References: kernels/<op>/reference.py.

All tensors are float32, dense and on the CPU. Packed weights: packed.py. Batch-invariant: a row of a result is the
same to the last bit whatever other rows are computed with it, in one prefill, in chunks or token by token, with any number of threads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshlm.kernels.attention.seen import Seen
from meshlm.kernels.cpu.library import call

MAX_HEAD_DIM = 1024
_at = Tensor.data_ptr  # of a tensor that outlives the call


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """x [m, k] -> [m, outputs]. packed: see packed.py."""
    x = x.contiguous()
    out = torch.empty(x.shape[0], outputs)
    if call().meshlm_linear(
        _at(x), _at(packed), bias if bias is None else _at(bias), _at(out), x.shape[0], outputs, x.shape[1]
    ):
        raise MemoryError("no memory for rounded activations")
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [m, n] -> [m, n]; x / rms(x) * weight."""
    x = x.contiguous()
    out = torch.empty_like(x)
    call().meshlm_rms_norm(None, _at(x), _at(weight), _at(out), *x.shape, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x, in place; the norm of the sum."""
    x = x.contiguous()
    out = torch.empty_like(x)
    call().meshlm_rms_norm(_at(x), _at(residual), _at(weight), _at(out), *x.shape, eps)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """[m, 2n] -> silu(gate) * up [m, n]."""
    m, n = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up, out = gate_up.contiguous(), torch.empty(m, n)
    call().meshlm_silu_mul(_at(gate_up), _at(out), m, n)
    return out


def act_mul(gate_up: Tensor, act: str) -> Tensor:
    """[m, 2n] -> act(gate) * up [m, n]; act: silu, gelu or gelu_pytorch_tanh. ValueError for another."""
    if act == "silu":
        return silu_mul(gate_up)
    if act not in ("gelu", "gelu_pytorch_tanh"):
        raise ValueError(f"{act}: no activation of silu, gelu, gelu_pytorch_tanh")
    m, n = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up, out = gate_up.contiguous(), torch.empty(m, n)
    call().meshlm_gelu_mul(_at(gate_up), _at(out), m, n, act == "gelu_pytorch_tanh")
    return out


def rope_cache(
    qkv: Tensor, positions: Tensor, slots: Tensor, table: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float,
    keys: Tensor, values: Tensor, num_heads: int,
) -> Tensor:  # fmt: skip
    """qkv [t, (heads + 2 kv_heads) d] -> query [t, heads, d]; keys and values [..., kv_heads, d] are written at `slots`."""
    kv_heads, d = keys.shape[-2:]
    query = torch.empty(qkv.shape[0], num_heads, d)
    q_norm, k_norm = map(_at, norms) if norms else (None, None)
    sizes = (qkv.shape[0], num_heads, kv_heads, d, table.shape[1])
    qkv = qkv.contiguous()
    read = (_at(qkv), _at(positions), _at(slots), _at(table), q_norm, k_norm, eps)
    call().meshlm_rope_cache(*read, _at(query), _at(keys), _at(values), *sizes)
    return query


def norm_linear(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, packed: Tensor, bias: Tensor | None, outputs: int,
    gate: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """linear(rms_norm(x + residual)), with `gate` followed by silu_mul; and x + residual, which is `residual`, changed in place."""
    x = x.contiguous()
    stream = x if residual is None else residual
    m, k = x.shape
    normed, out = torch.empty(m, k), torch.empty(m, outputs)
    gated = torch.empty(m, outputs // 2) if gate else None
    added, bias_at = None if residual is None else _at(x), None if bias is None else _at(bias)
    read = (added, _at(stream), _at(weight), eps, _at(normed), _at(packed), bias_at)
    if call().meshlm_norm_linear(*read, _at(out), gated if gated is None else _at(gated), m, outputs, k):
        raise MemoryError("no memory for rounded activations")
    return (out if gated is None else gated), stream


def spans(counts: Sequence[int], num_decodes: int, num_heads: int, kv_heads: int) -> Tensor:
    """int64 [s, 3]: request, first row and rows of what attention computes together. counts: rows of the requests after the decodes."""
    most = int(call().meshlm_span_rows(num_heads, kv_heads))
    found = [(row, row, 1) for row in range(num_decodes)]
    begin = num_decodes
    for request, count in enumerate(counts, num_decodes):
        found += [(request, begin + at, min(most, count - at)) for at in range(0, count, most)]
        begin += count
    return torch.tensor(found, dtype=torch.long).reshape(-1, 3)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, positions: Tensor, spans: Tensor, seen: Seen
) -> Tensor:
    """query [t, heads, d] over keys, values [blocks, size, kv_heads, d] -> [t, heads, d].

    tables int64 [n, any]: blocks of a request; positions int64 [t]; a row sees the keys up to its own position."""
    t, heads, d = query.shape
    _, size, kv_heads, _ = keys.shape
    query, out = query.contiguous(), torch.empty(t, heads, d)
    memory = map(_at, (query, keys, values, tables, positions, spans, out))
    sizes = (heads, kv_heads, d, size, tables.stride(0))
    sees = (seen.scale, seen.softcap, seen.window, seen.chunk, seen.sinks, seen.slopes)
    if call().meshlm_attention(*memory, spans.shape[0], *sizes, *sees):
        raise MemoryError("no memory for attention")
    return out
