"""Makes a model of transformers with its weights: transformers reads them by its own names, each rank keeps its part."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshlm.protocol.config import Resolved
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.runtime.model_files.checkpoint_files import is_needless
from meshlm.workers import memory
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.models.transformers import interface
from meshlm.workers.models.transformers.config import class_of, config_of
from meshlm.workers.models.transformers.look import Layout, look
from meshlm.workers.models.transformers.model import TransformersModel
from meshlm.workers.models.transformers.parallel import split

Progress = Callable[[int, int], None]


def load_transformers(
    resolved: Resolved, dtype: torch.dtype, device: torch.device, seed: int, progress: Progress, shard: Shard
) -> TransformersModel:
    """This rank's part of the model on its device. It is whole in the host's memory before. ProcessFatal."""
    source, folder = resolved.spec.transformers, Path(resolved.model_path)
    assert source is not None
    try:
        layout = look(source, folder)
        config = config_of(source, folder)
        made = class_of(config, source, folder)
    except ModelFilesError as error:
        raise ProcessFatal(f"{folder}: {error}") from None
    weight_bytes = layout.weight_bytes * dtype.itemsize // torch.bfloat16.itemsize
    memory.check_weights(weight_bytes // shard.size, device, 0)
    progress(0, weight_bytes)
    model = _whole(made, config, resolved, dtype, seed).eval().requires_grad_(requires_grad=False)
    found = _model(resolved, layout, shard, model)
    progress(weight_bytes, weight_bytes)
    return found.to(device)


def _model(resolved: Resolved, layout: Layout, shard: Shard, model: Any) -> TransformersModel:
    """Ranks sum by what they were joined with, which is known later."""
    found: TransformersModel | None = None

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        assert found is not None
        return found.comm.all_reduce(x)

    if shard.tp_size > 1:
        split(model, shard, all_reduce)
    layers = shard.layers(len(layout.modules))
    here = layout.modules[layers.start : layers.stop]
    found = TransformersModel(resolved.spec, resolved.max_model_len, shard, model, here)
    return found


def _whole(made: Any, config: Any, resolved: Resolved, dtype: torch.dtype, seed: int) -> Any:
    keywords = {"dtype": dtype, "attn_implementation": interface.SERVING}
    if resolved.load_format == "dummy":
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return made._from_config(config, **keywords)
    try:
        model, info = made.from_pretrained(
            resolved.model_path,
            config=config,
            use_safetensors=resolved.load_format == "safetensors",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            local_files_only=True,
            **keywords,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise ProcessFatal(f"{resolved.model_path}: transformers cannot load it ({why})") from None
    for kind, names in (
        ("missing", info["missing_keys"]),
        ("of another shape than the configuration says", [found[0] for found in info["mismatched_keys"]]),
        ("that the model does not have", [name for name in info["unexpected_keys"] if not is_needless(name)]),
    ):
        if names:
            count = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
            raise ProcessFatal(f"{resolved.model_path}: {count} {kind}: {', '.join(sorted(names)[:3])}")
    return model
