"""The self-tests of Triton's kernels for recurrent states, at each start, beside plain torch, which computes where they are wrong.

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
from meshlm.kernels.states import PIECE
from meshlm.protocol.layers import StateSpec
from meshlm.workers.batch import UNKNOWN, KnownRequests, Prompt, RequestLens, StateCache, StepInputs
from meshlm.workers.rows.step_columns import StepColumns, columns_of
from meshlm.workers.states.random_mixer import RandomMixer
from meshlm.workers.states.torch_states import TorchStates
from meshlm.workers.states.triton_states import TritonStates, pieces_of

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
    """Why the kernels must not be used for such states, or be in CUDA graphs with prompts; "" when they may.

    ssm: the dtype of the states of heads; dtype: of all else.
    """
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
    """What no request has written is the same in both, and would be seen."""
    heads = (2, NUM_PAGES, -(-state.num_heads // 2), state.head_dim, state.state_size)
    channels = (2, NUM_PAGES, -(-state.conv_dim // 2), state.conv_kernel - 1)
    return StateCache(
        torch.full(heads, 7.0, dtype=ssm, device=device), torch.full(channels, 7.0, dtype=dtype, device=device), 0
    )
