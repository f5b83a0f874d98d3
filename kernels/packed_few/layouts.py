"""Where tensors of Gluon's kernels lie in threads, for products whose operands are loaded where tensor cores want them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def bits(dim: int, rank: int, first: int, end: int) -> list[list[int]]:
    """The bases of a linear layout that go along a dimension from `first` to `end`, powers of two."""
    found = []
    while first < end:
        found.append([first if at == dim else 0 for at in range(rank)])
        first *= 2
    return found


@gluon.constexpr_function
def along(layout: object, dim: int, rank: int) -> object:
    """The layout of a tensor of one dimension that another layout has."""
    for other in reversed(range(rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def spread(values, DIM: gl.constexpr, RANK: gl.constexpr):
    """A tensor of one dimension, with others of one element around it. Its layout: `along`."""
    for other in gl.static_range(RANK):
        if other != DIM:
            values = gl.expand_dims(values, other)
    return values


@gluon.jit
def range_of(SIZE: gl.constexpr, LAYOUT: gl.constexpr, DIM: gl.constexpr, RANK: gl.constexpr):
    """0 to SIZE along a dimension; the others have one element."""
    return spread(gl.arange(0, SIZE, along(LAYOUT, DIM, RANK)), DIM, RANK)


@gluon.jit
def empty_tuple():
    """A tuple that tensors are added to. (Its type, unlike that of `()`, is not of its length.)"""
    return ()


@gluon.jit
def pin_loads(WARPS: gl.constexpr):
    """Loads above are asked for here: the compiler moves none behind this. For GPUs that have PDL (kernels/pdl.py). That the kernel
    behind may begin has been said before; to say it again does nothing."""
    thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1
    )
