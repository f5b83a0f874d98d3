"""A layer of experts with packed weights, by a plan (plan.py): what workers, the tuner of a start and the bench compute."""

from typing import NamedTuple

from torch import Tensor

from meshlm.kernels.moe_align.kernel import align, most_tiles
from meshlm.kernels.moe_epilogue.kernel import PLAIN, Epilogue
from meshlm.kernels.packed_experts import kernel
from meshlm.kernels.packed_experts.kernel import Parts, Rows
from meshlm.kernels.packed_experts.layout import ExpertWeight
from meshlm.kernels.packed_experts.plan import Plan


class Order(NamedTuple):
    """Sorted rows; and where each entry is among them, int32 [m, topk]."""

    rows: Rows
    positions: Tensor


def num_rows(plan: Plan, rows: int, num_topk: int, num_experts: int) -> int:
    if plan.kind == "few":
        return rows * num_topk
    return most_tiles(rows * num_topk, num_experts, plan.block_m) * plan.block_m


def order(plan: Plan, experts: Tensor, num_experts: int) -> Order | None:
    """The order of the entries of experts [m, topk]; None where they are not sorted."""
    if plan.kind == "few":
        return None
    ids, positions, ends, owners = align(experts, num_experts, plan.block_m)
    return Order(Rows(ids, ends, owners, experts.shape[1], experts.numel()), positions)


def gate(
    plan: Plan, x: Tensor, w: ExpertWeight, experts: Tensor, given: Order | None, inner: Tensor, epilogue: Epilogue = PLAIN
) -> Tensor:  # fmt: skip
    """x [m, hidden] -> inner [num_rows, wide]."""
    if plan.direct is not None:
        from meshlm.kernels.packed_experts import direct  # its dialect takes long to import

        shape = plan.direct.gate
        if given is None:
            return direct.few(x, w, experts, None, inner, shape, epilogue)
        return direct.sorted_rows(x, w, inner, shape, plan.block_m, given.rows, gate=True, epilogue=epilogue)
    if given is None:
        return kernel.few(x, w, experts, None, inner, plan.gate, epilogue)
    return kernel.sorted_rows(x, w, inner, plan.gate, given.rows, gate=True, epilogue=epilogue)


def down(
    plan: Plan, inner: Tensor, w: ExpertWeight, to: Parts, given: Order | None, out: Tensor, epilogue: Epilogue = PLAIN, *, parts: bool
) -> Tensor:  # fmt: skip
    """inner -> parts (always of rows that are not sorted), float32 [topk, m, hidden], weighted; or [num_rows, hidden], sorted."""
    leaving = to if parts else None
    if plan.direct is not None and plan.direct.down is not None:
        from meshlm.kernels.packed_experts import direct  # its dialect takes long to import

        shape = plan.direct.down
        if given is None:
            return direct.few(inner, w, to.experts, to.weights, out, shape, epilogue)
        return direct.sorted_rows(inner, w, out, shape, plan.block_m, given.rows, parts=leaving, epilogue=epilogue)
    if given is None:
        return kernel.few(inner, w, to.experts, to.weights, out, plan.down, epilogue)
    return kernel.sorted_rows(inner, w, out, plan.down, given.rows, parts=leaving, epilogue=epilogue)
