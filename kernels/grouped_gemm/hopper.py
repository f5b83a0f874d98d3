"""The products of many sorted rows on Hopper, by warps that do one thing each (Triton's Gluon): four load, eight multiply.

The formula is kernel.py's, of weights of 16 bits. A tile is 128 rows of one expert and 256 lines of its weight (gate: 128 of the gate
and the same 128 of up). Four warps bring the lines of both into a ring of buffers in shared memory, whatever else goes on: by bulk
copies, and rows that are gathered by asynchronous ones. Two groups of four warps have 64 rows of the tile each. They wait for a buffer,
multiply, and say that it may be filled again; neither waits for the other, so while one stores its results the other multiplies. A
group whose rows are all padding leaves the tensor cores to the other, and rows of padding are not stored.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from meshlm.kernels import pdl
from meshlm.kernels.moe_align.kernel import ROWS as _ROWS

# In newer versions of Triton the copies have other names.
bring = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
bring_each = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

LINES = gl.constexpr(128)  # of a weight that come at once; a tile has twice as many
ROWS = gl.constexpr(64)  # of a group of warps
DEEP = gl.constexpr(64)  # inputs of a buffer
REGISTERS = (224, 64)  # of a thread that multiplies, and of one that loads
GROUP = gl.constexpr(8)  # tiles of rows that share lines of a weight
MARK = gl.constexpr(_ROWS)  # moe_align: what an owner's number of rows is multiplied by


@gluon.jit
def _wait_for_others():
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _let_others_begin():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _tile_at(nth, down, across):
    """See kernel.py."""
    first = nth // (GROUP * across) * GROUP
    height = gl.minimum(GROUP, down - first)
    within = nth % (GROUP * across)
    return first + within % height, within // height


@gluon.jit
def _pointers(x, ids, row, TOPK: gl.constexpr, INPUTS: gl.constexpr):
    """The first inputs of 64 rows of a tile, gathered."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    entry = gl.load(ids + row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)))
    token = gl.where(entry >= 0, entry // TOPK, 0)
    inside = gl.arange(0, DEEP, gl.SliceLayout(0, layout))
    offset = gl.expand_dims(gl.multiple_of(token * INPUTS, 8), 1) + gl.expand_dims(inside, 0)
    return x + gl.max_contiguous(gl.multiple_of(offset, [1, 8]), [1, 8])


@gluon.jit
def _bring_rows(buffer, lines, k, INPUTS: gl.constexpr):
    if INPUTS % DEEP == 0:
        bring_each(buffer, lines + k)
    else:
        layout: gl.constexpr = lines.type.layout
        inside = gl.multiple_of(k, 8) + gl.arange(0, DEEP, gl.SliceLayout(0, layout)) < INPUTS
        bring_each(buffer, lines + k, gl.max_constancy(gl.expand_dims(inside, 0), [1, 8]))


@gluon.jit
def _load(
    x, w, a, b, full, empty, ids, owners, tiles,
    TOPK: gl.constexpr, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, GATE: gl.constexpr, GATHER: gl.constexpr,
    ACROSS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills buffers, in the order in which they are multiplied."""
    wide: gl.constexpr = LINES if GATE else 2 * LINES
    weight_bytes: gl.constexpr = 2 * LINES * DEEP * 2
    each_bytes: gl.constexpr = ROWS * DEEP * 2
    step = 0
    for nth in range(gl.program_id(0), tiles * ACROSS, gl.num_programs(0)):
        tile, column = _tile_at(nth, tiles, ACROSS)
        owner = gl.load(owners + tile)
        rows = owner // MARK
        line = owner % MARK * (2 * OUTPUTS if GATE else OUTPUTS) + column * wide
        row = tile * (2 * ROWS)
        if GATHER:
            first = _pointers(x, ids, row, TOPK, INPUTS)
            second = _pointers(x, ids, row + ROWS, TOPK, INPUTS)
        for k in range(0, INPUTS, DEEP):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            ready = full.index(stage)
            if GATHER:
                mbarrier.expect(ready, weight_bytes)
            else:
                mbarrier.expect(ready, weight_bytes + each_bytes, pred=rows <= ROWS)
                mbarrier.expect(ready, weight_bytes + 2 * each_bytes, pred=(rows > ROWS) & (rows <= 2 * ROWS))
            weight = b.index(stage)
            bring(w, [line, k], ready, weight.slice(0, LINES))
            bring(w, [line + (OUTPUTS if GATE else LINES), k], ready, weight.slice(LINES, LINES))
            mine = 2 * stage
            if GATHER:
                _bring_rows(a.index(mine), first, k, INPUTS)
                if rows > ROWS:
                    _bring_rows(a.index(mine + 1), second, k, INPUTS)
                async_copy.mbarrier_arrive(ready, increment_count=False)
            else:
                bring(x, [row, k], ready, a.index(mine))
                bring(x, [row + ROWS, k], ready, a.index(mine + 1), pred=rows > ROWS)
            step += 1


@gluon.jit
def _multiply(
    part: gl.constexpr, out, a, b, full, empty, staging, owners, tiles,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, GATE: gl.constexpr, ACROSS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 of the rows of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * LINES, 16])
    wide: gl.constexpr = LINES if GATE else 2 * LINES
    steps: gl.constexpr = (INPUTS + DEEP - 1) // DEEP
    mine = staging.index(part)
    step = 0
    # The second group begins a step behind the first one, so that they do not store at the same time.
    if part == 1 and steps > 1 and STAGES > 1:  # noqa: SIM102 (constants of the compiler)
        if gl.program_id(0) < tiles * ACROSS:
            mbarrier.wait(full.index(1), 0)
    for nth in range(gl.program_id(0), tiles * ACROSS, gl.num_programs(0)):
        tile, column = _tile_at(nth, tiles, ACROSS)
        rows = gl.load(owners + tile) // MARK - part * ROWS
        if rows > 0:
            total = gl.full((ROWS, 2 * LINES), 0.0, gl.float32, layout)
            for k in range(steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                total = warpgroup_mma(
                    a.index(2 * stage + part), b.index(stage).permute((1, 0)), total, use_acc=k > 0, is_async=True
                )
                total = warpgroup_mma_wait(1, deps=(total,))
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
                step += 1
            total = warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
            _store(total, out, mine, tile * (2 * ROWS) + part * ROWS, rows, column * wide, OUTPUTS, GATE)
        else:
            for _ in range(steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                mbarrier.arrive(empty.index(stage))
                step += 1


@gluon.jit
def _rounded(x, dtype: gl.constexpr):
    """x, float32, rounded to 16 bits; two at a time, since one by one is several times as slow."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
            "=r,=r,r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return x.to(dtype).to(gl.float32)


@gluon.jit
def _store(total, out, staging, row, rows, column, OUTPUTS: gl.constexpr, GATE: gl.constexpr):
    left, right = gl.split(gl.permute(gl.reshape(total, (ROWS, 2, LINES)), (0, 2, 1)))
    if GATE:
        left = _rounded(left, staging.dtype)
        left = _rounded(left / (1.0 + gl.exp(-left)), staging.dtype) * _rounded(right, staging.dtype)
    _store_part(left, out, staging, row, rows, column, OUTPUTS)
    if not GATE:
        _store_part(right, out, staging, row, rows, column + LINES, OUTPUTS)


@gluon.jit
def _store_part(values, out, staging, row, rows, column, OUTPUTS: gl.constexpr):
    """Through shared memory, so that a row's results go out together."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    staging.store(values.to(staging.dtype))
    lines = staging.load(layout)
    nth = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    inside = column + gl.arange(0, LINES, gl.SliceLayout(0, layout))
    place = gl.expand_dims((row + nth).to(gl.int64) * OUTPUTS, 1) + gl.expand_dims(inside, 0)
    place = gl.max_contiguous(gl.multiple_of(place, [1, 8]), [1, 8])
    mask = gl.expand_dims(nth < rows, 1) & gl.max_constancy(gl.expand_dims(inside < OUTPUTS, 0), [1, 8])
    gl.store(out + place, lines, mask=mask)


@gluon.jit
def _warps_apart(
    x, w, out, ids, ends, owners,
    EXPERTS: gl.constexpr, TOPK: gl.constexpr, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, GATE: gl.constexpr,
    GATHER: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr, MULTIPLIES: gl.constexpr, LOADS: gl.constexpr,
):  # fmt: skip
    """w is a descriptor of [EXPERTS x (gate: 2) x OUTPUTS, INPUTS], x of [rows, INPUTS] unless GATHER. out [rows, OUTPUTS].

    ids, ends, owners: as moe_align gives them for tiles of 128 rows."""
    dtype: gl.constexpr = w.dtype
    across: gl.constexpr = (OUTPUTS + (LINES if GATE else 2 * LINES) - 1) // (LINES if GATE else 2 * LINES)
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    b = gl.allocate_shared_memory(dtype, [STAGES, 2 * LINES, DEEP], lines)
    a = gl.allocate_shared_memory(dtype, [STAGES * 2, ROWS, DEEP], lines)
    staging = gl.allocate_shared_memory(dtype, [2, ROWS, LINES], lines)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=129 if GATHER else 1)  # each thread that gathers, and the bulk copies
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    if PDL:
        _wait_for_others()
        if GATE:
            _let_others_begin()  # see kernel.py
    tiles = gl.load(ends + (EXPERTS - 1))
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), out, a, b, full, empty, staging, owners, tiles, INPUTS, OUTPUTS, GATE, across, STAGES)),
            (_multiply, (gl.constexpr(1), out, a, b, full, empty, staging, owners, tiles, INPUTS, OUTPUTS, GATE, across, STAGES)),
            (_load, (x, w, a, b, full, empty, ids, owners, tiles, TOPK, INPUTS, OUTPUTS, GATE, GATHER, across, STAGES)),
        ],
        [4, 4],
        [MULTIPLIES, LOADS],
    )  # fmt: skip


def sorted_gemm(
    x: Tensor, w: Tensor, out: Tensor, stages: int, ends: Tensor, owners: Tensor, ids: Tensor | None, num_topk: int,
    *, gate: bool,
) -> None:  # fmt: skip
    """See kernel.py. owners: as moe_align gives them; it has as many as there may be tiles."""
    assert x.element_size() == w.element_size() == 2
    num_experts, lines, inputs = w.shape
    outputs = lines // 2 if gate else lines
    shared = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    wide = LINES.value if gate else 2 * LINES.value
    rows = x if ids is not None else TensorDescriptor(x, [*x.shape], [inputs, 1], [ROWS.value, DEEP.value], shared)
    programs = min(len(owners) * triton.cdiv(outputs, wide), pdl.multiprocessors(out.device))
    _warps_apart[(max(1, programs),)](
        rows, TensorDescriptor(w, [num_experts * lines, inputs], [inputs, 1], [LINES.value, DEEP.value], shared),
        out, ends if ids is None else ids, ends, owners,
        EXPERTS=num_experts, TOPK=num_topk, INPUTS=inputs, OUTPUTS=outputs, GATE=gate, GATHER=ids is not None,
        STAGES=stages, PDL=pdl.supported(), MULTIPLIES=REGISTERS[0], LOADS=REGISTERS[1], num_warps=4, launch_pdl=True,
    )  # fmt: skip
