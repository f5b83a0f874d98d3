"""Recurrent states by the Triton kernels: the requests are the step's columns on the device."""

import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.causal_conv.kernel import causal_conv
from meshlm.kernels.gated_delta.kernel import chunk_rule
from meshlm.kernels.gated_delta.update import rule_update
from meshlm.kernels.selective_scan.kernel import scan_update, selective_scan
from meshlm.kernels.ssd.kernel import chunk_scan
from meshlm.kernels.ssd.reference import TimeSteps
from meshlm.kernels.ssd.update import state_update
from meshlm.kernels.states import Pieces
from meshlm.workers.batch import UNKNOWN, StateCache, StepInputs

KINDS = ("mamba2", "short_conv", "gated_delta_net", "mamba")  # that these kernels serve, where their self-test is right


def pieces_of(batch: StepInputs, block_size: int) -> Pieces | None:
    """The prompts of a step, the same for all groups; None where all requests decode. In a graph, whose requests nobody knows, the
    device cuts them."""
    columns = batch.columns
    assert columns is not None
    if batch.num_decodes == columns.n:
        return None
    if batch.num_decodes == UNKNOWN:
        return Pieces.of_columns(columns, len(batch.input_ids), block_size)
    assert batch.known is not None
    first = batch.num_decodes
    prompts = [(first + nth, one.start, one.num_tokens) for nth, one in enumerate(batch.known.prompts)]
    return Pieces.of_prompts(prompts, block_size, batch.device)


class TritonStates:
    """See `StepStates`. Made once for the layers of a group. In a graph every request is asked whether it decodes."""

    def __init__(self, batch: StepInputs, group: int, block_size: int, pieces: Pieces | None) -> None:
        """pieces: by `pieces_of`."""
        columns = batch.columns
        assert columns is not None
        self._page, self._pieces = block_size, pieces
        self._num = columns.n if batch.num_decodes == UNKNOWN else batch.num_decodes
        self._at = Columns(columns.rows, columns.starts, columns.ends, columns.n, batch.block_tables[group])

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, *, silu: bool = True) -> Tensor:
        return causal_conv(x, weight, bias, cache.conv, self._at, self._num, self._pieces, self._page, silu=silu)

    def ssd(self, x: Tensor, steps: TimeSteps, a: Tensor, b: Tensor, c: Tensor, d: Tensor, cache: StateCache) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        given = (x, steps, a, b, c, d, cache.ssm, out, self._at)
        if self._num:
            state_update(*given, self._num, self._page)
        if self._pieces is not None:
            chunk_scan(*given, self._pieces, self._page)
        return out

    def selective_scan(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, cache: StateCache
    ) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        given = (x, dt, a, b, c, d, gate, cache.ssm, out, self._at)
        if self._num:
            scan_update(*given, self._num, self._page)
        if self._pieces is not None:
            selective_scan(*given, self._pieces, self._page)
        return out

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor, cache: StateCache
    ) -> Tensor:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        given = (q, k, v, a, b, rate, bias, cache.ssm, out, self._at)
        if self._num:
            rule_update(*given, self._num, self._page)
        if self._pieces is not None:
            chunk_rule(*given, self._pieces, self._page)
        return out
