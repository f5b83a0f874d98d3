"""The pages of an engine's KV tensors, by the device that these are on."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.kv.pages import Column, HostPages, KVPages, SharedBytes


def pages_of(tensors: Sequence[Tensor], num_pages: int, shared: SharedBytes | None, *, shares: bool) -> KVPages:
    """The first pages of these KV tensors, uint8 [halves, pages, bytes]; those behind them hold states of drafts, which stay here.

    shared: the host's memory in which they lie, where others may read it. shares: whether they may. ProcessFatal."""
    halves = [half[:num_pages] for tensor in tensors for half in tensor]
    if halves[0].device.type == "cpu":
        columns: list[Column] = [np.asarray(half.numpy()) for half in halves]
        return HostPages(columns, None if shared is None else shared.memory(columns))
    from meshlm.workers.cuda.driver import DriverError

    try:
        from meshlm.workers.kv.device_pages import DevicePages
    except ImportError as error:
        raise ProcessFatal(f"KV pages of a GPU move by a kernel of Triton: {error}") from None
    try:
        return DevicePages(halves, shared=shares)
    except DriverError as error:
        raise ProcessFatal(f"KV pages of this GPU cannot move: {error}") from None
