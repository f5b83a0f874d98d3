"""Products of one row with a weight, bound by reading the weight once; the norm before and the gate after come for free.

    x = x / sqrt(mean(x^2) + eps) * own_weight        (OWN: a norm before the sum; rounded to the stream's dtype)
    h = x + residual                                  (NORM with a residual; rounded to the stream's dtype)
    y = h / sqrt(mean(h^2) + eps) * norm_weight       (NORM)
    out = y W^T + bias
    out = act(y W_gate^T) * (y W_up^T)                (GATE: W holds the gate's rows, then the up projection's; kernels/silu_mul)

W may be 8-bit floats with scales of its rows, or of groups of a row's inputs; y is rounded to such as kernels/quantise_fp8 does it.

A program computes BLOCK_N outputs, then the next such block, up to the end; there are as many programs as run at once. It keeps y in
registers, in one part or in two (`parts_of`): a power of two of inputs, and the rest. Its tiles of the weight are one stream of
asynchronous copies, STAGES deep, so that the memory is never without requests; the stream starts while the kernel before this one
still runs (PDL). Tensor cores would add nothing for one row.

Products that are parts of a sum over ranks (bfloat16) need no kernel for the sum:

    SENDS     out goes as packets (kernels/packets.py) to all ranks, this one too; nothing is stored here
    RECEIVES  x = sum over ranks of what they sent, in their order; every program polls all of it, its weights being under way

The inboxes are row 0 of allreduce_rmsnorm's, whose two halves take turns. A packet of turn t + 2 may overwrite one of turn t: its
sender has finished the kernel that received turn t + 1, so it has had packets of that turn from every peer, and a peer sends none
before all programs of its kernel that received turn t are done. That is what gdc_wait says: it returns when the kernel before has
ended, and as every program of every kernel calls it, so have all before that one; and every program here calls it before it sends.
The count of turns is not advanced while programs may still read it: kernels add `nth`, their place behind the last allreduce_rmsnorm,
which advances it by all of them.
Nobody waits for ever: a receiving kernel stands on its stream behind the kernels, here and on the peers, that send to it, and these
wait for earlier ones only. Programs that poll keep no sender of their own GPU from running: it has ended before they begin to poll.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import packets, pdl, tables
from meshlm.kernels.allreduce_rmsnorm.kernel import Workspace
from meshlm.kernels.fp8_gemm.reference import Fp8Weight
from meshlm.kernels.gemv.rounding import codes_of, in_8_bits, in_model_dtype, scale_of
from meshlm.kernels.gemv.tile import ROW, load, times_row
from meshlm.kernels.packets import FOR_EVER
from meshlm.kernels.silu_mul.kernel import ACTS, activated

ONE_PART = 4096  # inputs up to which a row has one part: two cost such short sums more than they spare


def parts_of(inputs: int, fold: int, way: str = "") -> tuple[int, int]:
    """The powers of two that hold a row's inputs: of the first part, and of the second, 0 where that spares nothing.

    fold: numbers that the threads of a program load at once; a second part has so many at least, so that both lie among the threads
    alike, and are added before anything is passed between these. way: products that send or receive packets have one part."""
    one = triton.next_power_of_2(inputs)
    rest = max(fold, triton.next_power_of_2(max(1, inputs - one // 2)))
    two = inputs > ONE_PART and one // 2 < inputs and one // 2 + rest < one and way in ("", "8 bits")
    return (one // 2, rest) if two else (one, 0)


def fold_of(warps: int, size: int) -> int:
    """Numbers of `size` bytes that the threads of a program load at once: 16 bytes each."""
    return 32 * warps * 16 // size


@triton.jit
def _added(h, residual, stream, k, first, K: tl.constexpr):
    """h + residual at k, float32; the first program stores it."""
    h += tl.load(residual + k, mask=k < K, other=0.0).to(tl.float32)
    h = h.to(stream.dtype.element_ty).to(tl.float32)
    if first == 0:
        tl.store(stream + k, h.to(stream.dtype.element_ty), mask=k < K)
    return h


@triton.jit
def _inverse(h, rest, eps, K: tl.constexpr, REST: tl.constexpr):
    """1 / sqrt(mean + eps) of the squares of a row, in one part or two."""
    squares = tl.sum(h * h, axis=0)
    if REST:
        squares += tl.sum(rest * rest, axis=0)
    return tl.rsqrt(squares / K + eps)


@triton.jit
def _weights(norm_weight, k, k_rest, K: tl.constexpr, REST: tl.constexpr):
    """Of a norm, float32, at k and at k_rest."""
    factor = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
    return factor, tl.load(norm_weight + k_rest, mask=k_rest < K, other=0.0).to(tl.float32) if REST else factor


@triton.jit
def _row(
    x, residual, norm_weight, own_weight, stream, k, k_rest, first, eps, own_eps,
    K: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, OWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y float32, at k and at k_rest."""
    if NORM:
        factor, factor_rest = _weights(norm_weight, k, k_rest, K, REST)
    if OWN:
        own, own_rest = _weights(own_weight, k, k_rest, K, REST)
    if PDL:
        tl.extra.cuda.gdc_wait()
    h = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    rest = tl.load(x + k_rest, mask=k_rest < K, other=0.0).to(tl.float32) if REST else h
    if OWN:
        scale = _inverse(h, rest, own_eps, K, REST)
        h = (h * scale * own).to(stream.dtype.element_ty).to(tl.float32)
        if REST:
            rest = (rest * scale * own_rest).to(stream.dtype.element_ty).to(tl.float32)
    if NORM and ADD:
        h = _added(h, residual, stream, k, first, K)
        if REST:
            rest = _added(rest, residual, stream, k_rest, first, K)
    if NORM:
        scale = _inverse(h, rest, eps, K, REST)
        h *= factor * scale
        if REST:
            rest *= factor_rest * scale
    return h, rest


@triton.jit
def _summed_row(
    residual, norm_weight, stream, inboxes, turns, nth, first, eps, patience,
    K: tl.constexpr, BLOCK_K: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same of what the ranks sent. residual, norm_weight, stream: words of two columns."""
    at = tl.arange(0, BLOCK_K // 2)
    inside = at < K // 2
    scale, scale_odd = packets.columns_of(tl.load(norm_weight + at, mask=inside, other=0), True)
    if PDL:
        tl.extra.cuda.gdc_wait()
    line, odd = packets.columns_of(tl.load(residual + at, mask=inside, other=0), True)
    turn = tl.load(turns) + nth
    here = (turn & 1) * (SIZE * STRIDE) + tl.minimum(at, K // 2 - 1)  # beside the row no packet ever comes
    total, total_odd = packets.receive(tl.load(inboxes + RANK), here, turn, patience, SIZE, STRIDE, True, WAIT)
    line = packets.rounded(packets.rounded(total, True) + line, True)
    odd = packets.rounded(packets.rounded(total_odd, True) + odd, True)
    if first == 0:
        tl.store(stream + at, packets.words_of(line, odd, True), mask=inside)
    inverse = tl.rsqrt(tl.sum(tl.where(inside, line * line + odd * odd, 0.0), axis=0) / K + eps)
    return tl.interleave(line * (inverse * scale), odd * (inverse * scale_odd))


def _products(
    x, residual, norm_weight, own_weight, weight, scales, given, bias, out, stream, inboxes, turns, nth, blocks,
    eps, own_eps, patience,
    K: tl.constexpr, OUTPUTS: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, OWN: tl.constexpr, GATE: tl.constexpr,
    ACT: tl.constexpr, BIAS: tl.constexpr, SENDS: tl.constexpr, RECEIVES: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, WAIT: tl.constexpr, GROUP: tl.constexpr, ROUNDED: tl.constexpr, STATIC: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, REST: tl.constexpr, FOLD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATE and SENDS read two rows of the weight for each of BLOCK_N: gate and up, or the two columns of a packet.

    GROUP, ROUNDED: inputs that share a scale of the weight, and of y; ROW: all of a row; 0: there are none. REST: inputs behind
    BLOCK_K, as a power of two, the second part of a row; 0: there is one part. FOLD: numbers that the threads load at once."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0)
    nth_row, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    k_rest = BLOCK_K + tl.arange(0, REST if REST else BLOCK_K)
    lines: tl.constexpr = OUTPUTS // 2 if SENDS else OUTPUTS
    whole: tl.constexpr = (K >= BLOCK_K) and (lines % BLOCK_N == 0)
    whole_rest: tl.constexpr = (K == BLOCK_K + REST) and (lines % BLOCK_N == 0)
    h = tl.zeros((BLOCK_K,), tl.float32)
    rest = tl.zeros((REST if REST else 1,), tl.float32)
    turn = 0
    y_scale = 1.0
    if SENDS:
        addresses = tl.load(inboxes + tl.arange(0, SIZE))
    for block in tl.range(first, blocks, tl.num_programs(0), num_stages=STAGES):
        n = block * BLOCK_N + nth_row
        real = n < lines
        if SENDS:
            w = load(weight, 2 * n, k, real, K, whole)
            w_odd = load(weight, 2 * n + 1, k, real, K, whole)
        else:
            w = load(weight, n, k, real, K, whole)
        w_rest = load(weight, n, k_rest, real, K, whole_rest) if REST else w
        if GATE:
            w_up = load(weight, n + OUTPUTS, k, real, K, whole)
            w_up_rest = load(weight, n + OUTPUTS, k_rest, real, K, whole_rest) if REST else w_up
        if block == first:  # in the loop, because the stream of copies starts where the loop does
            if RECEIVES:
                h = _summed_row(
                    residual, norm_weight, stream, inboxes, turns, nth, first, eps, patience,
                    K, BLOCK_K, RANK, SIZE, STRIDE, WAIT, PDL,
                )  # fmt: skip
            else:
                h, h_rest = _row(
                    x, residual, norm_weight, own_weight, stream, k, k_rest, first, eps, own_eps, K, REST, NORM, ADD, OWN, PDL,
                )  # fmt: skip
                if ROUNDED == ROW and not STATIC:
                    h = in_model_dtype(h, k, out.dtype.element_ty, K, BLOCK_K, PAIRS)
                    largest = tl.max(tl.abs(h), axis=0)
                    if REST:
                        h_rest = in_model_dtype(h_rest, k_rest, out.dtype.element_ty, K, BLOCK_K + REST, PAIRS)
                        largest = tl.maximum(largest, tl.max(tl.abs(h_rest), axis=0))
                    y_scale = scale_of(largest)
                    h = codes_of(h, y_scale)
                    if REST:
                        h_rest = codes_of(h_rest, y_scale)
                elif ROUNDED:
                    h = in_8_bits(h, k, given, out.dtype.element_ty, K, BLOCK_K, BLOCK_K, ROUNDED, STATIC)
                    if REST:
                        h_rest = in_8_bits(
                            h_rest, k_rest, given, out.dtype.element_ty, K, BLOCK_K + REST, REST, ROUNDED, STATIC
                        )
                if REST:
                    rest = h_rest
            if SENDS:
                turn = tl.load(turns) + nth
        result = times_row(w, w_rest, h, rest, scales, n, real, K, BLOCK_N, BLOCK_K, REST, FOLD, GROUP)
        if ROUNDED == ROW and not STATIC:
            result *= y_scale
        if SENDS:
            odd = tl.sum(w_odd.to(tl.float32) * h[None, :], axis=1)
            if BIAS:
                result += tl.load(bias + 2 * n, mask=real, other=0.0).to(tl.float32)
                odd += tl.load(bias + 2 * n + 1, mask=real, other=0.0).to(tl.float32)
            half = ((turn & 1) * SIZE + RANK) * STRIDE
            there = addresses[:, None] + (half + n)[None, :].to(tl.int64) * 8
            packets.send(there, packets.words_of(result, odd, True)[None, :], turn, real[None, :])
        else:
            if GATE:
                up = times_row(
                    w_up, w_up_rest, h, rest, scales, n + OUTPUTS, real, K, BLOCK_N, BLOCK_K, REST, FOLD, GROUP
                )
                if ROUNDED == ROW and not STATIC:
                    up *= y_scale
                result = activated(result, ACT) * up
            if BIAS:
                result += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)
            tl.store(out + n, result.to(out.dtype.element_ty), mask=real)


VARY = ["nth", "patience"]
_gemv = triton.jit(_products, do_not_specialize=VARY)
# Where packets are received, neighbouring lanes must have neighbouring ones, not four each: what is beside them is not called aligned.
_gemv_of_sum = triton.jit(
    _products, do_not_specialize=VARY, do_not_specialize_on_alignment=["residual", "norm_weight", "stream"]
)


class Turn(NamedTuple):
    """A sum over ranks: number `nth` behind the last allreduce_rmsnorm in the same room. bfloat16, an even number of columns."""

    workspace: Workspace
    nth: int
    patience: int = FOR_EVER


@tables.remembered
def most_bytes() -> int:
    """The largest size of a weight in bytes; larger ones cuBLAS reads as fast as this kernel."""
    return int(tables.read("gemv")["most_bytes"])


def pays(weight: Tensor, rows: int) -> bool:
    """Whether this kernel is the faster one."""
    return rows == 1 and weight.numel() * weight.element_size() <= most_bytes() and weight.shape not in _lost()


@tables.remembered
def _lost() -> frozenset[tuple[int, int]]:
    """Sizes of weights with which cuBLAS was the faster one, as the tuner has found: there is no tile."""
    table = tables.read("gemv")
    in_steps = table.get("in_steps", []) if tables.is_alike(table) else []
    lost = [tables.key_of(entry) for entry in in_steps if not entry["tile"]]
    lost += [key for key, entry in tables.all_added("gemv").items() if entry["measured"] and not entry["rows"]]
    return frozenset((outputs * (2 if gate else 1), inputs) for outputs, inputs, gate in lost)


Tile = tuple[int, int, int, int]  # BLOCK_N, warps, stages, programs per multiprocessor
SHARED_BYTES = 227 << 10  # of an H200, for one program
EXACT = ("outputs", "inputs", "gate", "way")  # what a tile was chosen for in whole steps
BESIDE = 2 << 10  # bytes of shared memory that a program needs beside its tiles of the weight, at most


@tables.remembered
def shape_of(outputs: int, inputs: int, gate: bool, way: str = "", size: int = 2) -> Tile:
    """The tile shape: as whole steps chose it on this processor (--tune full), else the first entry of the table that fits.

    way: "sends" or "receives" packets: there BLOCK_N is of pairs, and here each program costs the reading of all packets; or "8 bits".
    size: bytes of a weight's number, of which shared memory must hold a tile."""
    if not way:
        tables.note_use("gemv", (outputs, inputs, gate))
    table, lines = tables.read("gemv"), 2 if gate or way == "sends" else 1
    for entry in table.get("in_steps", []) if tables.is_alike(table) else []:
        if entry["tile"] and tuple(entry.get(name, "") for name in EXACT) == (outputs, inputs, gate, way):
            return _with_room(entry["tile"], inputs, lines, way, size)
    if not way and (tile := _found(outputs, inputs, gate)):
        return _with_room(tile, inputs, lines, way, size)
    for entry in table["tiles"]:
        fits = inputs <= entry.get("inputs_to", inputs) and outputs <= entry.get("outputs_to", outputs)
        if fits and gate == entry.get("gate", gate) and way == entry.get("way", ""):
            return _with_room(entry["tile"], inputs, lines, way, size)
    if way:  # a table made before there were such
        block_n, warps, stages, programs = shape_of(outputs, inputs, gate, size=size)
        return (
            (block_n, warps, stages, programs)
            if way in ("receives", "8 bits")
            else (max(1, block_n // 2), warps, stages, max(1, programs // 2))
        )
    raise AssertionError("the last entry of a table fits all")


def _found(outputs: int, inputs: int, gate: bool) -> list[int] | None:
    """The tile that the tuner of a start has found."""
    entry = tables.added("gemv", (outputs, inputs, gate))
    found: list[list[list[int]]] = entry["rows"] if entry else []
    return found[0][2] if found else None


def _with_room(tile: list[int], inputs: int, lines: int, way: str, size: int) -> Tile:
    """The tile of a table, or less of it where that is of a GPU with more shared memory.

    lines: of the weight for each of BLOCK_N. size: bytes of a number."""
    block_n, warps, stages, programs = tile
    line = lines * sum(parts_of(inputs, fold_of(warps, size), way)) * size
    workspace = shared_bytes() - BESIDE
    while stages > 2 and block_n * line * (stages - 1) > workspace:
        stages -= 1
    while block_n > 1 and block_n * line * (stages - 1) > workspace:
        block_n //= 2
    return block_n, warps, stages, programs


@cache
def shared_bytes() -> int:
    """The bytes of shared memory of this GPU, for one program; an H200's without a GPU, and where torch does not tell."""
    if not torch.cuda.is_available():
        return SHARED_BYTES
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(getattr(properties, "shared_memory_per_block_optin", SHARED_BYTES))


def gemv(
    x: Tensor, weight: Tensor | Fp8Weight, bias: Tensor | None = None, *, norm: Tensor | None = None,
    residual: Tensor | None = None, eps: float = 0.0, own: tuple[Tensor, float] | None = None, gate: str = "",
    shape: tuple[int, int, int, int] | None = None, sends: Turn | None = None, receives: Turn | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [1, k]; weight [n, k] (gate: [2 n, k]) -> out [1, n] and the stream x + residual [1, k] (else x).

    gate: one of ACTS, or none. own: weight and eps of a norm of x alone, before it is added: with norm and residual, without receives.
    sends: out stays empty, its columns are on their way. receives: x stands for what comes; with norm and residual. Neither is there
    for a weight of 8-bit floats."""
    inputs, fp8 = x.shape[1], Fp8Weight(weight, x, rounded=None) if isinstance(weight, Tensor) else weight
    weight, eight_bits = fp8.codes, not isinstance(weight, Tensor)
    outputs = weight.shape[0] // 2 if gate else weight.shape[0]
    assert own is None or (residual is not None and norm is not None and receives is None)
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    stream = torch.empty_like(x) if residual is not None else x
    way = "sends" if sends else "receives" if receives else "8 bits" if eight_bits else ""
    block_n, warps, stages, per_sm = shape or shape_of(outputs, inputs, bool(gate), way, weight.element_size())
    blocks = triton.cdiv(outputs // 2 if sends else outputs, block_n)
    fold = fold_of(warps, weight.element_size())
    block_k, rest = parts_of(inputs, fold, way)
    beside = [residual if residual is not None else x, norm if norm is not None else x, stream]
    turn, size, stride, wait = sends or receives, 1, 1, packets.PLAIN
    if turn is not None:
        size, stride = turn.workspace.size, turn.workspace.rows * turn.workspace.columns // 2
        assert x.dtype == torch.bfloat16 and (outputs if sends else inputs) == turn.workspace.columns  # noqa: PT018
    if receives:
        beside = [t.view(torch.int32) for t in beside]
        if x.is_cuda:
            wait = packets.wait(
                size, stride, True, max(1, block_k // (64 * warps)), (receives.workspace.rank + 1) % size
            )
    (_gemv_of_sum if receives else _gemv)[(min(blocks, per_sm * pdl.multiprocessors(x.device)),)](
        x, *beside[:2], x if own is None else own[0], weight, fp8.scales, x if fp8.input_scale is None else fp8.input_scale,
        bias if bias is not None else x, out, beside[2],
        turn.workspace.packets if turn else x, turn.workspace.turns if turn else x, turn.nth if turn else 0, blocks, eps,
        0.0 if own is None else own[1], turn.patience if turn else 0,
        K=inputs, OUTPUTS=outputs, NORM=norm is not None, ADD=residual is not None, OWN=own is not None, GATE=bool(gate),
        ACT=ACTS.index(gate) if gate else 0, BIAS=bias is not None, SENDS=sends is not None, RECEIVES=receives is not None,
        RANK=turn.workspace.rank if turn else 0, SIZE=size, STRIDE=stride, WAIT=wait,
        GROUP=(fp8.group or ROW.value) if eight_bits else 0, ROUNDED=0 if fp8.rounded is None else fp8.rounded or ROW.value,
        STATIC=fp8.input_scale is not None, PAIRS=x.is_cuda and x.dtype == torch.bfloat16,
        BLOCK_N=block_n, BLOCK_K=block_k, REST=rest, FOLD=fold, STAGES=stages, num_warps=warps, num_stages=stages,
        **pdl.options(x),
    )  # fmt: skip
    return out, stream
