"""Copies to a GPU's memory beside its steps, through pinned memory of a fixed size: nothing is allocated, so that graphs may be
captured meanwhile. Used by one thread at a time. A CPU's copies are done at once.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from meshlm.workers.cuda import driver

CHUNK = 8 << 20


class Copied(Protocol):
    """The end of a copy."""

    def synchronize(self) -> None:
        """Wait until it is done."""

    def hold_back_steps(self) -> None:
        """What this thread launches from now on begins when it is done."""


class SideStream(Protocol):
    def mark(self) -> Any:
        """The end of all that this thread has launched."""

    def wait_for(self, mark: Any) -> None:
        """What is copied from now on is written when the mark is reached; None: at once."""

    def copy(self, values: Tensor, to: Tensor) -> Copied:
        """Values of the host [n] to the first n of `to`, dense. They are read when this returns."""


class Done:
    def synchronize(self) -> None:
        """It is done."""

    def hold_back_steps(self) -> None:
        """It is done."""


class AtOnce:
    def mark(self) -> None:
        return None

    def wait_for(self, mark: Any) -> None:
        """All is computed."""

    def copy(self, values: Tensor, to: Tensor) -> Copied:
        to.flatten()[: values.numel()].copy_(values.flatten())
        return Done()


class EndOfCopy:
    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def synchronize(self) -> None:
        self._event.synchronize()

    def hold_back_steps(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class GpuStream:
    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Stream  # typed in some versions of torch only
        self._device, self._stream = device, make(device)
        self._pinned = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._read = [self._event(), self._event()]  # behind the last copy from each
        self._turn = 0

    @staticmethod
    def _event() -> Any:
        make: Any = torch.cuda.Event
        return make(blocking=True)

    def mark(self) -> Any:
        event = self._event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_for(self, mark: Any) -> None:
        if mark is not None:
            self._stream.wait_event(mark)

    def copy(self, values: Tensor, to: Tensor) -> Copied:
        assert to.is_contiguous()
        driver.use(self._device.index)  # another thread's context is another one, or none
        data = values.contiguous().view(-1).view(torch.uint8)
        for begin in range(0, len(data), CHUNK):
            chunk = data[begin : begin + CHUNK]
            pinned, read = self._pinned[self._turn], self._read[self._turn]
            self._turn = 1 - self._turn
            read.synchronize()
            pinned[: len(chunk)].copy_(chunk)
            stream = self._stream.cuda_stream
            driver.to_device(to.data_ptr() + begin, pinned.data_ptr(), len(chunk), stream, is_pinned=True)
            read.record(self._stream)
        end = self._event()
        end.record(self._stream)
        return EndOfCopy(end, self._device)


def side_stream_of(device: torch.device) -> SideStream:
    return GpuStream(device) if device.type == "cuda" else AtOnce()
