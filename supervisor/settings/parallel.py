"""Whether a model and this host can be split as the flags say: a table, read before any process starts. No torch."""

import os
from collections.abc import Mapping

from meshlm.protocol.config import ParallelConfig
from meshlm.protocol.model import ModelSpec
from meshlm.runtime import platforms
from meshlm.runtime.platforms import Platform
from meshlm.supervisor.settings import rules
from meshlm.supervisor.settings.rules import Rules


def check(
    parallel: ParallelConfig,
    spec: ModelSpec,
    device: str,
    here: int,
    *,
    whole_experts: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """UsageError names the flag, and what would do. `here`: workers of this node. whole_experts: none is split over ranks.

    environment: that of the workers."""
    platform = platforms.named(device)
    rules.check(_groups(parallel, platform, whole_experts))
    if platform.has_weights:
        rules.check(_splits(parallel, spec, spec.wide_sizes(whole_experts=whole_experts)))
        rules.check(_devices(parallel, here, platform.num_devices(environment)))


def _groups(p: ParallelConfig, platform: Platform, whole_experts: bool) -> Rules:
    wanted = p.workers_per_rank > 1 or whole_experts
    why = "its workers form no groups; leave out -tp, -pp and --enable-expert-parallel"
    yield wanted and not platform.forms_groups, f"--device {platform.name}", why


def _splits(p: ParallelConfig, spec: ModelSpec, wide: tuple[int, ...]) -> Rules:
    """What the model cannot be split into. wide: its intermediate sizes."""
    size, stages = p.tensor_parallel_size, p.pipeline_parallel_size
    tensor, pipeline = f"--tensor-parallel-size {size}", f"--pipeline-parallel-size {stages}"
    if (source := spec.transformers) is not None:
        yield stages > 1 and source.not_staged, pipeline, f"{source.architecture}: {source.not_staged}"
        yield size > 1 and source.not_split, tensor, f"{source.architecture}: {source.not_split}"
        num = spec.num_key_value_heads
        why = f"does not divide the {num} key-value heads, which --model-impl transformers does not repeat"
        yield num % size, tensor, why
    reason = _one_stage(spec)
    why = f"{spec.architecture}: {reason}; use --tensor-parallel-size"
    yield stages > 1 and reason, "--pipeline-parallel-size", why
    if (state := spec.state) is not None:
        why = f"does not divide the {state.num_heads} heads and {state.n_groups} groups of this model's recurrent states, which are "
        other = "normed together; use --pipeline-parallel-size or --data-parallel-size"
        yield state.num_heads % size or state.n_groups % size, tensor, why + other
    heads, keys = spec.num_attention_heads, dict.fromkeys(one.num_key_value_heads for one in spec.attentions)
    fit = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and not any(each % n for each in wide) and not any(each % n and n % each for each in keys)
    ]
    can = f"this model can be split over {', '.join(map(str, fit))}"
    yield heads % size, tensor, f"does not divide the model's {heads} attention heads; {can}"
    for num in keys:
        why = f"neither divides the model's {num} key-value heads nor is a multiple; {can}"
        yield num % size and size % num, tensor, why
    for each in wide:
        yield each % size, tensor, f"does not divide the model's intermediate size {each}; {can}"
    layers = spec.num_hidden_layers
    divisors = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
    yield layers % stages, pipeline, f"does not divide the model's {layers} layers; {divisors} do"


def _one_stage(spec: ModelSpec) -> str:
    """Why a pipeline cannot have stages of this model; "" when it can."""
    if any(layer.cache_of is not None for layer in spec.layers):
        return "its last layers use keys and values of earlier ones, which another stage would have"
    if spec.altup is not None or spec.per_layer_input is not None:
        return "its layers take vectors that the first stage alone could make"
    if any(one.mla is not None and one.mla.index_shared for one in spec.attentions):
        return "layers attend to what an earlier one's index has chosen, which another stage may have"
    return ""


def _devices(p: ParallelConfig, need: int, have: int | None) -> Rules:
    """have: GPUs of this host; None where nothing counts them."""
    sizes = {"tensor": p.tensor_parallel_size, "pipeline": p.pipeline_parallel_size, "data": p.data_parallel_size}
    flags = " x ".join(f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1)
    everywhere = p.data_parallel_size * p.workers_per_rank
    here = f", {need} of them on this node" if need < everywhere else ""
    text = f"{flags} needs {everywhere} GPUs, one per worker{here}; this host shows {have}"
    yield have is not None and need > have, text, ""
