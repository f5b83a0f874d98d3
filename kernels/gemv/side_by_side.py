"""Gathers the columns of a row that a gemv of each rank has sent (kernel.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import packets, pdl
from meshlm.kernels.gemv.kernel import Turn


@triton.jit(do_not_specialize=["patience"], do_not_specialize_on_alignment=["out"])
def _side_by_side(
    out, inboxes, turns, width, patience,
    RANK: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr,
    WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out, width: words of two columns. turns: the turn, and how many programs have read it; the last one advances it."""
    pdl.follow(PDL)
    peer = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    turn = tl.load(turns)
    here = ((turn & 1) * SIZE + peer) * STRIDE + tl.minimum(at, WORDS - 1)
    even, odd = packets.receive(tl.load(inboxes + RANK), here, turn, patience, 1, STRIDE, True, WAIT)
    place = peer * WORDS + at
    tl.store(out + place, packets.words_of(even, odd, True), mask=(at < WORDS) & (place < width))
    tl.debug_barrier()  # every thread has read the turn
    if tl.atomic_add(turns + 1, 1) == tl.num_programs(0) * SIZE - 1:
        tl.store(turns + 1, 0)
        tl.store(turns, turn + 1)


WORDS_EACH = 1024  # of a program


def side_by_side(out: Tensor, turn: Turn) -> Tensor:
    """out [1, width], an even width: columns that a gemv of each rank has sent in this turn, those of rank 0 first.

    A room of its own, whose turns are the number, 1 at first, and 0. Its halves are as safe as those of sums: what is sent in turn
    t + 1 comes behind the sender's kernel of turn t."""
    workspace, width = turn.workspace, out.shape[1]
    words = workspace.columns // 2
    warps = 4
    wait = packets.wait(1, words, True, WORDS_EACH // (32 * warps)) if out.is_cuda else packets.PLAIN
    assert out.dtype == torch.bfloat16 and width % 2 == 0 and workspace.rows == 1  # noqa: PT018
    _side_by_side[(triton.cdiv(words, WORDS_EACH), workspace.size)](
        out.view(torch.int32), workspace.packets, workspace.turns, width // 2, turn.patience,
        RANK=workspace.rank, WORDS=words, BLOCK=WORDS_EACH, STRIDE=words, SIZE=workspace.size, WAIT=wait,
        num_warps=warps, **pdl.options(out),
    )  # fmt: skip
    return out
