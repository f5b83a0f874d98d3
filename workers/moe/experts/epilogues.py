"""What stands behind the products of experts, as kernels take it."""

from meshlm.kernels.moe_epilogue.kernel import PLAIN, Epilogue
from meshlm.workers.moe.parts import ExpertExtras


def epilogues(extras: ExpertExtras | None) -> tuple[Epilogue, Epilogue]:
    """What stands behind the products of gate and up, and behind that of down."""
    if extras is None:
        return PLAIN, PLAIN
    alpha, limit = extras.swiglu or (0.0, 0.0)
    return Epilogue(extras.gate_up_bias, alpha, limit), Epilogue(extras.down_bias)
