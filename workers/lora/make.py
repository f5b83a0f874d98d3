"""Makes an engine's adapters: what reads them, where they are kept, and that its steps know them."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.model_files.adapter_files import Limits
from meshlm.workers.engine.kit import TorchInputs
from meshlm.workers.lora.adapter_rows import AdapterRows
from meshlm.workers.lora.magnitudes import measure
from meshlm.workers.lora.weights import LoadedAdapter, load_adapter
from meshlm.workers.weights.load import DTYPES

if TYPE_CHECKING:
    from meshlm.workers.engine.engine import ModelEngine


def adapter_rows(engine: "ModelEngine") -> AdapterRows:
    """ProcessFatal where the device has no products of adapters."""
    settings = engine.config.adapters
    if not isinstance(engine.inputs, TorchInputs) or engine.device.type != "cpu":
        raise ProcessFatal(f"--enable-lora: --device {engine.resolved.device} has no adapters yet; the CPU has")
    dtype = engine.dtype if settings.lora_dtype == "auto" else DTYPES[settings.lora_dtype]
    load = partial(
        load_adapter,
        model=engine.model,
        limits=Limits(settings.max_lora_rank, settings.lora_target_modules),
        dtypes=(dtype, engine.dtype),
    )

    def measure_again(loaded: LoadedAdapter) -> None:
        with torch.inference_mode():
            measure(loaded.layers, engine.model.ops)

    rows = engine.rows.table.columns, engine.device
    found = AdapterRows(load, *rows, settings.max_loras, settings.num_kept, measure_again)
    engine.inputs.adapters = found
    return found
