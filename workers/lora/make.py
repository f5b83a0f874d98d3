"""Makes an engine's adapters: what reads them, where they are kept, and that its steps know them."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from meshlm.protocol.adapters import Adapter
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
    """By kernels, where the device has those; else by plain torch. ProcessFatal where there is no memory for the slots."""
    settings = engine.config.adapters
    if engine.together is not None and engine.device.type == "cuda":
        raise ProcessFatal(
            "--enable-lora: ranks whose experts step together have no adapters on GPUs yet; leave it out"
        )
    dtype = engine.dtype if settings.lora_dtype == "auto" else DTYPES[settings.lora_dtype]
    limits = Limits.of(engine.config, engine.resolved.device)
    load = partial(load_adapter, model=engine.model, limits=limits, dtypes=(dtype, engine.dtype))
    rows, sizes = (engine.rows.table.columns, engine.device), (settings.max_loras, settings.num_kept)
    if not isinstance(engine.inputs, TorchInputs):
        return _by_kernels(engine, load, limits)

    def measure_again(loaded: LoadedAdapter) -> None:
        with torch.inference_mode():
            measure(loaded.layers, engine.model.ops)

    engine.inputs.adapters = found = AdapterRows(load, *rows, *sizes, measure_again)
    return found


def _by_kernels(engine: "ModelEngine", load: "partial[LoadedAdapter]", limits: Limits) -> AdapterRows:
    from meshlm.workers.lora.device_slots import DeviceSlots  # by Triton, which may not be there
    from meshlm.workers.lora.slot_layout import SlotLayout

    assert not isinstance(engine.inputs, TorchInputs)
    settings, layout = engine.config.adapters, SlotLayout(engine.model, limits, engine.device)
    slots = DeviceSlots(layout, settings.max_loras, engine.dtype, engine.device)
    engine.inputs.adapters, engine.rows.has_adapters = slots, True

    def load_packed(adapter: Adapter) -> LoadedAdapter:
        return slots.packed(load(adapter, on_host=True))

    rows = engine.rows.table.columns, engine.device
    return AdapterRows(load_packed, *rows, settings.max_loras, settings.num_kept, in_memory=slots)
