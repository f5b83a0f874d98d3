"""Whether a model and this host can be split as the flags say; asked before any process starts. No torch."""

import os
from collections.abc import Mapping

from meshlm.protocol.config import ParallelConfig
from meshlm.protocol.model import ModelSpec
from meshlm.runtime import platforms
from meshlm.supervisor.errors import UsageError


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

    environment: that of the workers.
    """
    platform = platforms.named(device)
    if not platform.forms_groups and (parallel.workers_per_rank > 1 or whole_experts):
        raise UsageError(
            f"--device {device}: its workers form no groups; leave out -tp, -pp and --enable-expert-parallel"
        )
    if not platform.has_weights:
        return
    _check_transformers(parallel, spec)
    if parallel.pipeline_parallel_size > 1 and (reason := _one_stage(spec)):
        raise UsageError(f"--pipeline-parallel-size: {spec.architecture}: {reason}; use --tensor-parallel-size")
    _check_tensor(parallel.tensor_parallel_size, spec, spec.wide_sizes(whole_experts=whole_experts))
    stages, layers = parallel.pipeline_parallel_size, spec.num_hidden_layers
    if layers % stages:
        raise UsageError(
            f"--pipeline-parallel-size {stages}: does not divide the model's {layers} layers; {_divisors(layers)} do"
        )
    if (have := platform.num_devices(environment)) is not None:
        _check_devices(parallel, here, have)


def _one_stage(spec: ModelSpec) -> str:
    """Why a pipeline cannot have stages of this model; "" when it can."""
    if any(layer.cache_of is not None for layer in spec.layers):
        return "its last layers use keys and values of earlier ones, which another stage would have"
    if spec.altup is not None or spec.per_layer_input is not None:
        return "its layers take vectors that the first stage alone could make"
    if any(one.mla is not None and one.mla.index_shared for one in spec.attentions):
        return "layers attend to what an earlier one's index has chosen, which another stage may have"
    return ""


def _check_transformers(parallel: ParallelConfig, spec: ModelSpec) -> None:
    """What a model that transformers computes cannot be split into."""
    source, size, stages = spec.transformers, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if source is None:
        return
    if stages > 1 and source.not_staged:
        raise UsageError(f"--pipeline-parallel-size {stages}: {source.architecture}: {source.not_staged}")
    if size > 1 and source.not_split:
        raise UsageError(f"--tensor-parallel-size {size}: {source.architecture}: {source.not_split}")
    if spec.num_key_value_heads % size:
        raise UsageError(
            f"--tensor-parallel-size {size}: does not divide the {spec.num_key_value_heads} key-value heads, which "
            "--model-impl transformers does not repeat"
        )


def _check_tensor(size: int, spec: ModelSpec, wide: tuple[int, ...]) -> None:
    flag = f"--tensor-parallel-size {size}"
    if spec.state is not None and (spec.state.num_heads % size or spec.state.n_groups % size):
        raise UsageError(
            f"{flag}: does not divide the {spec.state.num_heads} heads and {spec.state.n_groups} groups of this model's "
            "recurrent states, which are normed together; use --pipeline-parallel-size or --data-parallel-size"
        )
    heads = spec.num_attention_heads
    keys = dict.fromkeys(one.num_key_value_heads for one in spec.attentions)
    fit = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and not any(each % n for each in wide) and not any(each % n and n % each for each in keys)
    ]
    if size in fit:
        return
    can = f"this model can be split over {', '.join(map(str, fit))}"
    if heads % size:
        raise UsageError(f"{flag}: does not divide the model's {heads} attention heads; {can}")
    for kv_heads in keys:
        if kv_heads % size and size % kv_heads:
            raise UsageError(f"{flag}: neither divides the model's {kv_heads} key-value heads nor is a multiple; {can}")
    size_left = next(each for each in wide if each % size)
    raise UsageError(f"{flag}: does not divide the model's intermediate size {size_left}; {can}")


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _check_devices(parallel: ParallelConfig, need: int, have: int) -> None:
    if need > have:
        everywhere = parallel.data_parallel_size * parallel.workers_per_rank
        flags = [
            f"{flag} {size}"
            for flag, size in (
                ("--tensor-parallel-size", parallel.tensor_parallel_size),
                ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
                ("--data-parallel-size", parallel.data_parallel_size),
            )
            if size > 1
        ]
        part = f", {need} of them on this node" if need < everywhere else ""
        raise UsageError(f"{' x '.join(flags)} needs {everywhere} GPUs, one per worker{part}; this host shows {have}")
