"""What kernels with recurrent states share: the requests of a step, and the pieces in which they compute its prompts.

A request's tokens, its position and its row of the block tables are the step's columns (kernels/attention/kernel.py: Columns). A
*piece* is a run of a prompt's tokens within one block, so that a state which is left behind a block's end stands behind a piece.

States lie in two halves (workers/kv/layout.py): line `l` of `half` lines each is place l % half of half l // half.

A CUDA graph has room for as many pieces as any step has that fits it, and the device cuts the prompts (`Pieces.of_columns`): those of
no prompt have no tokens, and their programs end at once.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.attention.requests import some_columns
from meshlm.kernels.op import Launch

PIECE = 128  # tokens, at most
MOST_PROMPTS = 64  # of a step that is replayed: room for more costs memory for the states between pieces


class Pieces(NamedTuple):
    """The prompts of a step, on the device."""

    pieces: Tensor  # int32 [m, 3]: request, its first token counted among the request's, number of tokens
    prompts: Tensor  # int32 [p, 2]: first piece, number of pieces

    @classmethod
    def of_prompts(
        cls, prompts: list[tuple[int, int, int]], block_size: int, device: torch.device, most: int = PIECE
    ) -> "Pieces":
        """prompts: request, position of its first token, number of tokens."""
        pieces: list[tuple[int, int, int]] = []
        ranges = []
        for request, start, count in prompts:
            first, at = len(pieces), start
            while at < start + count:
                end = min(start + count, (at // block_size + 1) * block_size, at + most)
                pieces.append((request, at - start, end - at))
                at = end
            ranges.append((first, len(pieces) - first))
        both = torch.tensor([number for line in (*pieces, *ranges) for number in line], dtype=torch.int32)
        both = both.to(device, non_blocking=True)
        return cls(both[: 3 * len(pieces)].view(-1, 3), both[3 * len(pieces) :].view(-1, 2))

    @classmethod
    def of_columns(cls, at: Columns, tokens: int, block_size: int, most: int = PIECE) -> "Pieces":
        """The pieces of all requests with more than one token, MOST_PROMPTS at most, cut by the device.

        at, tokens: of the step or, padded, of a CUDA graph. What is no prompt's are pieces of no tokens, and prompts of no pieces."""
        num_prompts = max(1, min(MOST_PROMPTS, at.n, tokens // 2))
        num_pieces = most_pieces(tokens, num_prompts, block_size, most)
        both = torch.zeros(3 * num_pieces + 2 * num_prompts, dtype=torch.int32, device=at.ends.device)
        pieces, prompts = both[: 3 * num_pieces].view(-1, 3), both[3 * num_pieces :].view(-1, 2)
        _cut[(at.n,)](
            at.starts, at.ends, pieces, prompts, at.n, num_pieces, num_prompts,
            PAGE=block_size, MOST=most, REQUESTS=triton.next_power_of_2(at.n), WIDE=64, num_warps=1,
        )  # fmt: skip
        return cls(pieces, prompts)


def most_pieces(tokens: int, prompts: int, block_size: int, most: int = PIECE) -> int:
    """The largest number of pieces of so many prompts that have so many tokens together.

    A run of L tokens within a block is less than L / most + 1 pieces, and c tokens stand in c / block_size + 2 blocks at most."""
    return tokens // most + tokens // block_size + 2 * prompts + 1


@triton.jit
def _runs(start, count, PAGE: tl.constexpr, MOST: tl.constexpr):
    """Tokens of a prompt up to its first block's end, and the pieces of that run, of the whole blocks behind it, and of the rest."""
    head = tl.minimum(count, PAGE - start % PAGE)
    rest = count - head
    whole = (rest // PAGE) * ((PAGE + MOST - 1) // MOST)
    return head, (head + MOST - 1) // MOST, whole, (rest % PAGE + MOST - 1) // MOST


@triton.jit(do_not_specialize=["n", "num_pieces", "num_prompts"])
def _cut(
    starts, ends, pieces, prompts, n, num_pieces, num_prompts,
    PAGE: tl.constexpr, MOST: tl.constexpr, REQUESTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program for a request: its pieces stand behind those of the requests before it."""
    request, r = tl.program_id(0), tl.arange(0, REQUESTS)
    here = r < n
    start = tl.load(starts + r, mask=here, other=0)
    count = tl.load(ends + r, mask=here, other=0) - tl.load(ends + r - 1, mask=here & (r > 0), other=0)
    _, first, whole, last = _runs(start, count, PAGE, MOST)
    num = tl.where(count > 1, first + whole + last, 0)
    own = tl.sum(tl.where(r == request, num, 0), axis=0)
    if own == 0:
        return
    before = tl.sum(tl.where(r < request, num, 0), axis=0)
    nth = tl.sum(tl.where((r < request) & (count > 1), 1, 0), axis=0)
    if nth < num_prompts:
        tl.store(prompts + 2 * nth, before)
        tl.store(prompts + 2 * nth + 1, own)
    begin = tl.sum(tl.where(r == request, start, 0), axis=0)
    tokens = tl.sum(tl.where(r == request, count, 0), axis=0)
    head, in_head, _, _ = _runs(begin, tokens, PAGE, MOST)
    each: tl.constexpr = (PAGE + MOST - 1) // MOST
    for base in range(0, own, WIDE):
        j = base + tl.arange(0, WIDE)
        behind = tl.maximum(j - in_head, 0)
        of_block = (behind % each) * MOST
        at = tl.where(j < in_head, j * MOST, head + (behind // each) * PAGE + of_block)
        most = tl.where(j < in_head, head - at, tl.minimum(PAGE - of_block, tokens - at))
        line, there = pieces + 3 * (before + j), (j < own) & (before + j < num_pieces)
        tl.store(line, request, mask=there)
        tl.store(line + 1, at, mask=there)
        tl.store(line + 2, tl.minimum(most, MOST), mask=there)


@triton.jit
def request_of(request, rows, starts, ends, tables, stride):
    """The first token and the number of tokens of a request, its position, and its block table."""
    before = tl.load(ends + request - 1, mask=request > 0, other=0)
    count = tl.load(ends + request) - before
    table = tables + tl.load(rows + request).to(tl.int64) * stride
    return before.to(tl.int64), count, tl.load(starts + request), table


@triton.jit
def piece_of(pieces, ends, piece):
    """The first token of a piece among the step's, and its number of tokens."""
    request, first = tl.load(pieces + 3 * piece), tl.load(pieces + 3 * piece + 1)
    token = (tl.load(ends + request - 1, mask=request > 0, other=0) + first).to(tl.int64)
    return token, tl.load(pieces + 3 * piece + 2)


@triton.jit
def left_in(table, start, end, count, PAGE: tl.constexpr):
    """The page that the state behind `end` of a request's `count` tokens goes to; -1: it is not left."""
    at = start + end
    row = (at - 1) // PAGE
    page = tl.load(table + row)
    after = tl.load(table + row + 1, mask=end < count, other=-1)
    left = (end == count) | ((at % PAGE == 0) & (after != page))
    return tl.where(left, page, -1).to(tl.int64)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as torch has it: beyond 20 it is x."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def time_step(dt, bias, low, high):
    """The step of Mamba-2 (kernels/ssd/reference.py: TimeSteps)."""
    return tl.minimum(tl.maximum(softplus(dt.to(tl.float32) + bias), low), high)


class StateStep:
    """Requests of a step with states, at random: prompts that begin, or decodes. For records."""

    def __init__(self, counts: tuple[int, ...], page: int, device: torch.device) -> None:
        """counts: tokens of each request; decodes where each has one."""
        decodes = max(counts) == 1
        start = page - 8 if decodes else 0
        self._page = page
        self.at, self.pages = some_columns([(start, count) for count in counts], page, device)
        self.tokens, self.num_decodes = sum(counts), len(counts) if decodes else 0
        self.pieces = (
            None if decodes else Pieces.of_prompts([(n, 0, one) for n, one in enumerate(counts)], page, device)
        )
        ends = self.at.ends.tolist()
        self.parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def states(self, lines: int, *sizes: int, dtype: torch.dtype) -> Tensor:
        """The states of so many lines, in two halves."""
        found: Tensor = torch.randn(2, self.pages, -(-lines // 2), *sizes, device=self.at.rows.device).to(dtype)
        return found

    def before(self, states: Tensor, lines: int) -> list[Tensor | None]:
        """The state that each request goes on from: [lines, ...], None where it begins."""
        if self.pieces is not None:
            return [None] * self.at.n
        whole = states.transpose(0, 1).flatten(1, 2)[:, :lines]
        return [whole[page] for page in self.at.blocks[:, 0].tolist()]

    def launch(
        self, kernels: tuple[Callable[..., object], Callable[..., object]], given: tuple[Any, ...],
        of_one: Callable[[slice, Tensor | None], Tensor], lines: int, flop: float, theirs: Mapping[str, Callable[[], object]],
    ) -> Launch:  # fmt: skip
        """kernels: of decodes, of prompts; given: what both take up to the states and the output. of_one: plain torch, of a request's
        tokens and of what it goes on from, float32. Decodes stand beside a copy of their states, prompts beside `theirs`."""
        *_, states, out = given

        def run() -> Tensor:
            if self.pieces is None:
                kernels[0](*given, self.at, self.num_decodes, self._page)
            else:
                kernels[1](*given, self.at, self.pieces, self._page)
            found: Tensor = out
            return found

        def expected() -> Tensor:
            before = [None if one is None else one.float() for one in self.before(states, lines)]
            return torch.cat([of_one(part, one) for part, one in zip(self.parts, before, strict=True)])

        if self.pieces is not None:
            return Launch(run, expected, num_flop=flop, beside=theirs)
        moved = 2 * self.at.n * states[:, 0].nbytes  # each is read once and written once
        source, copy = torch.empty(2, max(moved // 2, 1 << 20), dtype=torch.uint8, device=out.device).unbind()
        return Launch(run, expected, moved, beside={"copy": lambda: copy.copy_(source)})
