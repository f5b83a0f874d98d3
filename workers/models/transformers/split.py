"""Tensor parallelism by the plan that a configuration of transformers has (`base_model_tp_plan`): some products are split by rows of
their weight, others by columns, and these sum over the ranks.

What no plan names is whole on each rank, embeddings and output projection among it.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.distributed.shard import Shard

_WHOLE = ("replicated_with_grad_allreduce", "replicate", "replicated", "sequence_parallel")
_COLWISE, _ROWWISE = "colwise", "rowwise"


def why_not_split(model: Any) -> str:
    """Why ranks cannot split the layers of this model; empty: they can."""
    plan = getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        return "its configuration has no base_model_tp_plan"
    for name, style in plan.items():
        if style not in (_COLWISE, _ROWWISE, *_WHOLE) and not name.startswith(("embed_tokens", "lm_head")):
            return f"base_model_tp_plan has the style {style} for {name}"
    for name, module, style in _planned(model):
        if style in (_COLWISE, _ROWWISE) and type(module) is not nn.Linear:
            return f"base_model_tp_plan splits {name}, which is no linear layer"
    return ""


def _planned(model: Any) -> Iterator[tuple[str, nn.Module, str]]:
    plan = {
        re.compile(re.escape(name).replace(r"\*", r"\d+")): style
        for name, style in model.config.base_model_tp_plan.items()
        if not name.startswith(("embed_tokens", "lm_head"))
    }
    for name, module in model.base_model.named_modules():
        style = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), None)
        if style is not None:
            yield name, module, style


def split(model: Any, shard: Shard, all_reduce: Callable[[Tensor], Tensor]) -> None:
    """Leaves this rank's part of each product that the plan names."""
    for name, module, style in list(_planned(model)):
        if not isinstance(module, nn.Linear) or style in _WHOLE:
            continue
        dim = 0 if style == _COLWISE else 1
        if module.weight.shape[dim] % shard.tp_size:
            raise ProcessFatal(
                f"--tensor-parallel-size {shard.tp_size}: does not divide {module.weight.shape[dim]}, a size of {name}"
            )
        begin, end = shard.shard_range(module.weight.shape[dim])
        module.weight = nn.Parameter(module.weight.narrow(dim, begin, end - begin).clone(), requires_grad=False)
        if dim == 0:
            module.out_features = end - begin
            if module.bias is not None:
                module.bias = nn.Parameter(module.bias[begin:end].clone(), requires_grad=False)
            continue
        module.in_features = end - begin
        if shard.tp_rank and module.bias is not None:  # the first rank adds it
            module.register_parameter("bias", None)
        module.register_forward_hook(lambda module, inputs, out: all_reduce(out))
