"""Requests of models with recurrent states: their columns, pieces and pages, and what a reference leaves in them."""

from collections.abc import Callable

import torch
from device import DEVICE

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.states import Pieces

PAGE = 48
Requests = list[tuple[int, int, list[int]]]  # position, number of tokens, block table
STEPS: list[Requests] = [
    [(0, 1, [3]), (48, 1, [0, 1]), (50, 1, [5, 2]), (0, 0, [9])],
    [(7, 1, [4]), (0, 2, [5]), (0, 100, [0, 0, 1]), (48, 90, [2, 3, 6]), (20, 30, [7, 7]), (47, 2, [8, 10])],
]


def columns_of(requests: Requests) -> Columns:
    tables = torch.zeros(len(requests), 4, dtype=torch.int32)
    for row, (_, _, table) in enumerate(requests):
        tables[row, : len(table)] = torch.tensor(table)
    starts = torch.tensor([start for start, _, _ in requests], dtype=torch.int32)
    ends = torch.tensor([count for _, count, _ in requests]).cumsum(0).int()
    rows = torch.arange(len(requests), dtype=torch.int32)
    return Columns(rows.to(DEVICE), starts.to(DEVICE), ends.to(DEVICE), len(requests), tables.to(DEVICE))


def split_of(requests: Requests, most: int = 40) -> tuple[int, Pieces | None]:
    """The number of decodes, and the pieces of the rest."""
    decodes = next((n for n, (_, count, _) in enumerate(requests) if count > 1), len(requests))
    prompts = [(n, start, count) for n, (start, count, _) in enumerate(requests) if n >= decodes]
    return decodes, Pieces.of_prompts(prompts, PAGE, DEVICE, most) if prompts else None


def left(start: int, count: int, table: list[int]) -> list[tuple[int, int]]:
    """After how many tokens which page gets the state."""
    ends = [end for end in range(1, count) if (start + end) % PAGE == 0]
    found = [(end, table[(start + end - 1) // PAGE]) for end in ends]
    return [(end, page) for end, page in found if table[(start + end) // PAGE] != page] + [
        (count, table[(start + count - 1) // PAGE])
    ]


def halves(states: torch.Tensor) -> torch.Tensor:
    """[pages, lines, ...] -> [2, pages, half of the lines, ...]; an odd line too many is NaN."""
    pages, lines = states.shape[:2]
    half = -(-lines // 2)
    padded = states.new_full((pages, 2 * half, *states.shape[2:]), torch.nan)
    padded[:, :lines] = states
    return padded.view(pages, 2, half, *states.shape[2:]).transpose(0, 1).contiguous()


def whole(found: torch.Tensor, lines: int) -> torch.Tensor:
    return found.transpose(0, 1).flatten(1, 2)[:, :lines]


def states_like(*shape: int) -> torch.Tensor:
    """What no request goes on from is NaN."""
    return torch.randn(11, *shape, device=DEVICE)


def expected(
    requests: Requests,
    states: torch.Tensor,
    run: Callable[[slice, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of all tokens, and the states by page. run: a reference over some of the step's tokens, behind a state."""
    outputs, after, begin = [], states.clone(), 0
    for start, count, table in requests:
        before = states[table[(start - 1) // PAGE]] if start else None
        for end, page in left(start, count, table) if count else []:
            y, after[page] = run(slice(begin, begin + end), before)
            if end == count:
                outputs.append(y)
        begin += count
    return torch.cat(outputs), after
