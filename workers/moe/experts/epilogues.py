"""What stands behind the products of experts, as kernels take it."""

from meshlm.kernels.moe_epilogue.kernel import GELU_ALPHA, PLAIN, Epilogue
from meshlm.workers.moe.parts import ExpertExtras

ALPHAS = {"silu": 0.0, "gelu_pytorch_tanh": GELU_ALPHA}
"""Of the registry's ACTS."""


def epilogues(extras: ExpertExtras | None, act: str = "silu", *, gated: bool = True) -> tuple[Epilogue, Epilogue]:
    """What stands behind the products of gate and up, and behind that of down. act: one of ALPHAS, unless the extras have their own;
    without a gate UNGATED_ACT."""
    if not gated:
        assert extras is None
        return Epilogue(gated=False), PLAIN
    alpha, limit = ALPHAS.get(act, 0.0), 0.0
    if extras is None:
        return (Epilogue(alpha=alpha) if alpha else PLAIN), PLAIN
    if extras.swiglu is not None:
        alpha, limit = extras.swiglu
    return Epilogue(extras.gate_up_bias, alpha, limit), Epilogue(extras.down_bias)
