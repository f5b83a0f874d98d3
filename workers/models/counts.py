"""Numbers of a loaded model that its kernels are chosen by."""

from meshlm.workers.layers.moe import MoE
from meshlm.workers.models.decoder import Decoder, linears_of


def active_parameters(model: Decoder) -> int:
    """The number of the layers' parameters that compute a token."""
    whole = sum(parameter.numel() for parameter in model.layers.parameters())
    packed = sum(
        linear.inputs * linear.outputs - sum(weight.numel() for weight in linear.weights())
        for linear in linears_of(model.layers)
    )
    return whole + packed - sum(module.idle_parameters() for module in model.modules() if isinstance(module, MoE))


def warm_rows(model: Decoder, most: int) -> set[int]:
    """So many tokens, up to `most`, meet every variant of the kernels of experts and of quantised weights."""
    some = next((module for module in model.modules() if isinstance(module, MoE)), None)  # all have the same sizes
    experts = set() if some is None else some.fused.experts.warm_rows(some.moe.num_experts_per_tok, most)
    return experts.union(*(linear.format.warm_rows() for linear in linears_of(model)))
