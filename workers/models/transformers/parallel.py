"""Tensor parallelism by the plan that a configuration of transformers has (`base_model_tp_plan`): some products are split by rows of
their weight, others by columns, and these sum over the ranks.

What no plan names is whole on each rank, embeddings and output projection among it.

Pipeline parallelism by the plan that a configuration of transformers has (`base_model_pp_plan`): it names what stands before the
layers, the layers, and what stands behind them, and says that a layer needs the states of the one before and nothing else.

A stage runs the model's own code with its own layers. The others are there in name only; whatever that code makes of the states before
the stage's first layer is dropped for those that came from the stage before.
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


_NEEDS, _GIVES = {"hidden_states", "attention_mask"}, ["hidden_states"]


class _Absent(nn.Module):
    """In the place of what other stages have."""

    def forward(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        return states


def why_no_stages(model: Any, attending: tuple[str, ...]) -> str:
    """Why the layers of this model cannot be stages; empty: they can. attending: the names of the modules that attend, by layer."""
    plan = getattr(model.config, "base_model_pp_plan", None)
    if not plan:
        return "its configuration has no base_model_pp_plan"
    base = model.base_model
    names = [name for name in plan if isinstance(getattr(base, name, None), nn.ModuleList)]
    if len(names) != 1 or len(getattr(base, names[0])) != len(attending):
        return "base_model_pp_plan does not name its layers"
    (name,) = names
    needs, gives = plan[name]
    if not set(needs) <= _NEEDS or list(gives) != _GIVES:
        return f"base_model_pp_plan: its layers need {', '.join(needs)} and give {', '.join(gives)}"
    if missing := [each for each in plan if not isinstance(getattr(base, each, None), nn.Module)]:
        return f"base_model_pp_plan names {missing[0]}, which it does not have"
    own = [set(map(id, layer.modules())) for layer in getattr(base, name)]
    modules = dict(model.named_modules())
    if any(id(modules[each]) not in own[layer] for layer, each in enumerate(attending)):
        return "its layers are not in the order in which they attend"
    return ""


class Stage:
    """A stage of a model, of which only its part is left."""

    def __init__(self, model: Any, shard: Shard) -> None:
        self.given: Tensor | None = None  # [1, t, hidden], of the stage before
        self._left: Tensor | None = None
        base, plan = model.base_model, list(model.config.base_model_pp_plan)
        name = next(each for each in plan if isinstance(getattr(base, each), nn.ModuleList))
        layers, at = getattr(base, name), plan.index(name)
        here = shard.layers(len(layers))
        for number in range(len(layers)):
            if number not in here:
                layers[number] = _Absent()
        for each in ([] if shard.is_first else plan[:at]) + ([] if shard.is_last else plan[at + 1 :]):
            setattr(base, each, _Absent())
        if not shard.is_first:
            layers[here.start].register_forward_pre_hook(self._begin, with_kwargs=True)
        if not shard.is_last:
            layers[here.stop - 1].register_forward_hook(self._end)

    def take(self) -> Tensor:
        """The states behind the last layer of a stage that is not the last, [1, t, hidden]."""
        found, self._left = self._left, None
        assert found is not None
        return found

    def _begin(
        self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if given:
            return (self.given, *given[1:]), named
        return given, {**named, "hidden_states": self.given}

    def _end(self, layer: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        self._left = out[0] if isinstance(out, tuple) else out
