"""A mixer between its projections with random weights, for self-tests: by plain torch or by kernels.

The self-tests of Triton's kernels for recurrent states, at each start, beside plain torch, which computes where they are wrong.

`self_test_states` runs the kernels alone, with the sizes of the model's states and pages: prompts in several pieces, chunks behind a
state, prompts that cross a block's end with a checkpoint and without, decodes. In graphs: as CUDA graphs of mixed steps launch them,
beside padding that is not a number. workers/engine/state_self_test.py runs the whole stage with its own weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.self_test import Result, distance, why_wrong
from meshlm.kernels.ssd.reference import TimeSteps
from meshlm.kernels.states import PIECE
from meshlm.protocol.layers import StateSpec
from meshlm.workers.batch import UNKNOWN, KnownRequests, Prompt, RequestLens, StateCache, StepInputs
from meshlm.workers.rows.step_columns import StepColumns, columns_of
from meshlm.workers.states.torch_states import StepStates, TorchStates
from meshlm.workers.states.triton_states import TritonStates, pieces_of


class RandomMixer:
    """Its weights are as models begin with. What it is given is a line of `width` numbers of each token, whose parts are the inputs, as
    those of a model are parts of one product."""

    def __init__(self, state: StateSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._device, heads = device, state.num_heads
        self._state, self._numbers = state, state.n_groups * state.state_size
        rest = {
            "mamba2": [heads],  # dt
            "gated_delta_net": [heads, heads],  # a, b
            "mamba": [state.inner, state.state_size, state.state_size],  # dt, B, C
            "short_conv": [],
        }[state.kind]
        self._sizes = [state.inner, state.conv_dim, *rest]
        self.width = sum(self._sizes)
        self._weight = (self._some(state.conv_dim, state.conv_kernel) * 0.5).to(dtype)
        self._bias = self._some(state.conv_dim).to(dtype) if state.conv_bias else None
        columns = [state.state_size] if state.kind == "mamba" else []
        self._a = -torch.linspace(0.1, 16, heads, device=device).view(heads, *[1] * len(columns)).repeat(1, *columns)
        self._shift, self._d = self._some(heads) - 3, self._some(heads)

    def _some(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self._device)

    def run(self, given: Tensor, states: StepStates, cache: StateCache) -> list[Tensor]:
        """Runs the convolution, and the layer's own operation, if it has one. given [t, width]."""
        state = self._state
        gate, inputs, *rest = given.split(self._sizes, dim=1)
        mixed = states.conv(inputs, self._weight, self._bias, cache, silu=state.kind != "short_conv")
        match state.kind:
            case "short_conv":
                return [mixed]
            case "mamba2":
                found = self._ssd(mixed, rest[0], states, cache)
            case "gated_delta_net":
                found = self._gated_delta(mixed, rest[0], rest[1], states, cache)
            case "mamba":
                dt, b, c = rest[0] + self._shift.to(given.dtype), rest[1], rest[2]
                found = states.selective_scan(mixed, dt, self._a, b, c, self._d, gate, cache)
        return [mixed, found]

    def _ssd(self, mixed: Tensor, dt: Tensor, states: StepStates, cache: StateCache) -> Tensor:
        state = self._state
        x, b, c = mixed.split([state.inner, self._numbers, self._numbers], dim=1)
        groups = (len(x), state.n_groups, state.state_size)
        heads = x.reshape(len(x), state.num_heads, state.head_dim)
        steps = TimeSteps(dt, self._shift)
        return states.ssd(heads, steps, self._a, b.reshape(groups), c.reshape(groups), self._d, cache)

    def _gated_delta(self, mixed: Tensor, a: Tensor, b: Tensor, states: StepStates, cache: StateCache) -> Tensor:
        state = self._state
        q, k, v = mixed.split([self._numbers, self._numbers, state.inner], dim=1)
        query, key = (each.unflatten(1, (state.n_groups, state.state_size)) for each in (q, k))
        heads = v.unflatten(1, (state.num_heads, state.head_dim))
        return states.gated_delta(query, key, heads, a, b, self._a, self._shift, cache)


NEAR = 0.03  # of norms: rounding to 16 bits in a convolution, a scan and a state makes less
LONG = PIECE + 37


class Request(NamedTuple):
    """Tokens that it has in each step, and its block table."""

    counts: tuple[int, ...]
    table: tuple[int, ...]


def requests(page: int) -> list[Request]:
    """A long prompt in two chunks, one that is shorter than a convolution, one beyond a block without a checkpoint, one with it."""
    return [
        Request((LONG, 100, 1, 1), _pages(LONG + 102, page, 0)),
        Request((2, 1, 1, 1), (20,)),
        Request((page + 50, 40, 1, 1), (21, 21, *(22,) * (-(-(page + 92) // page) - 2))),
        Request((0, page + 3, 1, 1), (23, 24)),
    ]


def _pages(length: int, page: int, first: int) -> tuple[int, ...]:
    return tuple(range(first, first + -(-length // page)))


NUM_PAGES = 32


def step_of(history: Sequence[Request], nth: int) -> StepColumns:
    """The columns of a step; decodes stand first."""
    here = sorted(
        (row for row, one in enumerate(history) if one.counts[nth]), key=lambda row: history[row].counts[nth] != 1
    )
    starts = [sum(history[row].counts[:nth]) for row in here]
    counts = [history[row].counts[nth] for row in here]
    return columns_of(*(np.array(column, np.int32) for column in (here, starts, counts)))


def both_inputs(step: StepColumns, tables: Tensor) -> tuple[StepInputs, StepInputs]:
    """The step for plain torch, and for the kernels. tables int32 [rows, blocks]."""
    device, first, ends = tables.device, step.num_decodes, np.cumsum(step.counts)
    begins, lens = ends - step.counts, step.starts + step.counts
    positions = np.repeat(step.starts - begins, step.counts) + np.arange(step.t)
    at = torch.as_tensor(positions, dtype=torch.int64, device=device)
    rows, starts, stops = (
        torch.as_tensor(np.array(column), dtype=torch.int32, device=device) for column in (step.rows, step.starts, ends)
    )
    plain = StepInputs(
        input_ids=at, positions=at, slot_mapping=(at,), block_tables=(tables[rows.long()].long(),), logits_indices=None,
        num_decodes=first,
        lens=RequestLens(
            torch.as_tensor(lens, device=device), tuple(step.counts[first:].tolist()), tuple(lens[first:].tolist()), 0
        ),
    )  # fmt: skip
    known = (column[first:].tolist() for column in (step.rows, step.starts, begins, step.counts))
    columns = Columns(rows, starts, stops, step.n, tables)
    requests = KnownRequests(first, first, tuple(map(Prompt, *known)))
    return plain, replace(plain, block_tables=(tables,), lens=None, columns=columns, known=requests)


PADDING = 3  # requests and tokens of nobody


def padded(kernels: StepInputs) -> StepInputs:
    """A step as a CUDA graph has it: nobody knows its requests, and some of them and of its tokens are padding."""
    at, positions = kernels.columns, kernels.positions
    assert at is not None
    dummies = at.rows.new_full((PADDING,), at.blocks.shape[0] - 1)
    columns = Columns(
        torch.cat((at.rows, dummies)),
        torch.cat((at.starts, torch.zeros_like(dummies))),
        torch.cat((at.ends, at.ends[-1:].expand(PADDING))),
        at.n + PADDING,
        at.blocks,
    )
    more = torch.cat((positions, positions.new_zeros(PADDING)))
    return replace(kernels, input_ids=more, positions=more, num_decodes=UNKNOWN, columns=columns, known=None)


@cache
def self_test_states(
    state: StateSpec, page: int, ssm: torch.dtype, dtype: torch.dtype, device: torch.device, *, in_graphs: bool = False
) -> str:
    """Why the kernels must not be used for such states, or be in CUDA graphs with prompts; "" when they may. ssm: the dtype of the
    states of heads; dtype: of all else."""
    return why_wrong(
        Result("they are", error, NEAR) for error in _errors(state, page, ssm, dtype, device, in_graphs=in_graphs)
    )


def _errors(
    state: StateSpec, page: int, ssm: torch.dtype, dtype: torch.dtype, device: torch.device, *, in_graphs: bool
) -> Iterator[Tensor]:
    history = requests(page)
    tables = torch.zeros(len(history) + 1, 32, dtype=torch.int32, device=device)
    for row, one in enumerate(history):
        tables[row, : len(one.table)] = torch.tensor(one.table)
    theirs, mine = (_cache(state, ssm, dtype, device) for _ in range(2))
    layer = RandomMixer(state, dtype, device)
    for nth in range(len(history[0].counts)):
        step = step_of(history, nth)
        plain, kernels = both_inputs(step, tables)
        given = torch.randn(step.t, layer.width, device=device).to(dtype)
        wanted = layer.run(given, TorchStates(plain, 0, page), theirs)
        if in_graphs:
            kernels, given = padded(kernels), torch.cat((given, given.new_full((PADDING, layer.width), torch.nan)))
        found = layer.run(given, TritonStates(kernels, 0, page, pieces_of(kernels, page)), mine)
        yield from (distance(one[: step.t], other) for one, other in zip(found, wanted, strict=True))
    pages = torch.tensor(sorted({page for one in history for page in one.table}), device=device)
    for left, right in ((mine.ssm, theirs.ssm), (mine.conv, theirs.conv)):
        if left.numel():
            yield distance(left[:, pages], right[:, pages])


def _cache(state: StateSpec, ssm: torch.dtype, dtype: torch.dtype, device: torch.device) -> StateCache:
    """Bytes that no request has written are the same in both, and a change would be seen."""
    heads = (2, NUM_PAGES, -(-state.num_heads // 2), state.head_dim, state.state_size)
    channels = (2, NUM_PAGES, -(-state.conv_dim // 2), state.conv_kernel - 1)
    return StateCache(
        torch.full(heads, 7.0, dtype=ssm, device=device), torch.full(channels, 7.0, dtype=dtype, device=device), 0
    )
