"""Packets: what one rank writes into a peer's memory together with the word that says it has come.

A packet is one store of eight bytes: 32 bits of data (two bfloat16 columns or one float32 column), and in the upper half the number of
the turn. Such a store is seen whole or not at all (PTX ISA, memory consistency model: a scalar access of 64 bits), so nothing must be
waited for between data and flag, and the reader polls the packet itself (NCCL's LL protocol). It doubles the traffic: for few rows.

kernels/allreduce_rmsnorm and kernels/gemv send and receive. Whoever sends must know that the slot has been read: they say how.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

FOR_EVER = 2**31 - 1  # polls, a third of a microsecond each
MOST_IN_FLIGHT = 16  # loads of one thread


class Wait(NamedTuple):
    """How `receive` polls: PTX for `pack` elements at a time. No text: a plain loop, for the interpreter."""

    text: str
    constraints: str
    pack: int


@cache
def wait(size: int, stride: int, pairs: bool, elements: int, spin_on: int | None = None) -> Wait:
    """size: ranks, whose packets lie `stride` packets apart. elements: of a thread. Polls until the last has come.

    spin_on: a rank. Only one packet of it is polled by each thread until it comes, so that many programs that wait leave the cache to
    others; then all that were missing. None: all that are missing, always, which sees the last a little sooner.
    Operands: outputs even and odd columns (float32), inputs address, turn, patience; `pack` registers each."""
    pack = 1
    while pack * 2 * size <= MOST_IN_FLIGHT and elements % (pack * 2) == 0:
        pack *= 2
    places = [(peer, nth) for nth in range(pack) for peer in range(size)]
    even, odd, address, turn, patience = (range(k * pack, (k + 1) * pack) for k in range(5))

    def load(peer: int, nth: int) -> str:
        at = places.index((peer, nth))
        return f"ld.relaxed.sys.global.b64 packet{at}, [${address[nth]}+{peer * stride * 8}];"

    lines = [
        ".reg .pred missing, again;",
        ".reg .b32 polls, half;",
        f".reg .b32 data<{len(places)}>, turn<{len(places)}>;",
        f".reg .b64 packet<{len(places)}>;",
        ".reg .f32 part;",
        "mov.b32 polls, 0;",
        *(load(*place) for place in places),
        "look:",
        "add.s32 polls, polls, 1;",
    ]
    for at, (_, nth) in enumerate(places):
        test = (
            f"setp.ne.or.s32 again, turn{at}, ${turn[nth]}, again;" if at else f"setp.ne.s32 again, turn0, ${turn[0]};"
        )
        lines += [f"mov.b64 {{data{at}, turn{at}}}, packet{at};", test]
    lines += [f"setp.lt.and.s32 again, polls, ${patience[0]}, again;", "@!again bra come;"]
    if spin_on is not None:
        at = places.index((spin_on, pack - 1))
        lines += [
            "spin:",
            "add.s32 polls, polls, 1;",
            load(spin_on, pack - 1),
            f"mov.b64 {{data{at}, turn{at}}}, packet{at};",
            f"setp.ne.s32 missing, turn{at}, ${turn[0]};",
            f"setp.lt.and.s32 missing, polls, ${patience[0]}, missing;",
            "@missing bra spin;",
        ]
    for at, (peer, nth) in enumerate(places):
        lines += [f"setp.ne.s32 missing, turn{at}, ${turn[nth]};", f"@missing {load(peer, nth)}"]
    lines += ["bra look;", "come:"]
    for nth in range(pack):
        lines += [f"mov.f32 ${even[nth]}, 0f00000000;", f"mov.f32 ${odd[nth]}, 0f00000000;"]
        for peer in range(size):
            data = f"data{places.index((peer, nth))}"
            if not pairs:
                lines += [f"mov.b32 part, {data};", f"add.rn.f32 ${even[nth]}, ${even[nth]}, part;"]
                continue
            lines += [f"shl.b32 half, {data}, 16;", "mov.b32 part, half;"]
            lines += [f"add.rn.f32 ${even[nth]}, ${even[nth]}, part;"]
            lines += [f"and.b32 half, {data}, 0xffff0000;", "mov.b32 part, half;"]
            lines += [f"add.rn.f32 ${odd[nth]}, ${odd[nth]}, part;"]
    constraints = ["=&f"] * (2 * pack) + ["l"] * pack + ["r"] * (2 * pack)
    return Wait("\n".join(["{", *lines, "}"]), ",".join(constraints), pack)


PLAIN = Wait("", "", 1)


@triton.jit
def columns_of(words, PAIRS: tl.constexpr):
    """int32 -> even and odd columns, float32. Not PAIRS: a column each, and zeros."""
    if PAIRS:
        even = (words << 16).to(tl.float32, bitcast=True)
        odd = (words & -65536).to(tl.float32, bitcast=True)
    else:
        even = words.to(tl.float32, bitcast=True)
        odd = tl.zeros_like(even)
    return even, odd


@triton.jit
def rounded(x, PAIRS: tl.constexpr):
    """float32 as the stream's dtype keeps it."""
    if PAIRS:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        return x


@triton.jit
def words_of(even, odd, PAIRS: tl.constexpr):
    """The other way round; what is not a bfloat16 is rounded."""
    if PAIRS:
        low = even.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
        return low | (odd.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return even.to(tl.int32, bitcast=True)


@triton.jit
def send(there, words, turn, inside):
    """int32 words to the addresses `there`, int64. `.wt` makes of it one strong store at system scope (STG.64.STRONG.SYS)."""
    packets = (words.to(tl.int64) & 0xFFFFFFFF) | (turn.to(tl.int64) << 32)
    tl.store(there.to(tl.pointer_type(tl.int64)), packets, mask=inside, cache_modifier=".wt")


@triton.jit
def receive(
    inbox, at, turn, patience, SIZE: tl.constexpr, STRIDE: tl.constexpr, PAIRS: tl.constexpr, WAIT: tl.constexpr
):
    """The sum over ranks, in their order, of what comes to places `at` of the inbox at this address: even and odd columns, float32."""
    here = inbox + at.to(tl.int64) * 8
    if WAIT[0] != "":
        even, odd = tl.inline_asm_elementwise(
            WAIT[0], WAIT[1], [here, turn, patience], dtype=(tl.float32, tl.float32), is_pure=False, pack=WAIT[2]
        )
    else:
        even = tl.zeros(at.shape, tl.float32)
        odd = tl.zeros(at.shape, tl.float32)
        for peer in tl.static_range(SIZE):
            packets = (here + peer * STRIDE * 8).to(tl.pointer_type(tl.int64))
            came = tl.load(packets, volatile=True)
            polls = 1
            while (tl.max(((came >> 32).to(tl.int32) != turn).to(tl.int32), axis=0) > 0) & (polls < patience):
                came = tl.load(packets, volatile=True)
                polls += 1
            first, second = columns_of(came.to(tl.int32), PAIRS)
            even += first
            odd += second
    return even, odd


def pairs(dtype: torch.dtype) -> bool:
    """Whether a packet carries two columns."""
    return dtype == torch.bfloat16
