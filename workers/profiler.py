"""Traces of the worker by torch's profiler, as Chrome trace JSON (chrome://tracing, Perfetto).

Used by the stepper thread only (io.py): the profiler records the operations of the thread that starts it, and all of the GPU's.
"""

import importlib
import time
from pathlib import Path
from typing import Any

from meshlm.protocol.operations import OperationDone, OperationId


def load_profiler(folder: str) -> None:
    """What a trace needs, before the worker is ready: to import torch takes seconds, or a minute from a cold disk, in which a worker
    of --device fake, which has no other use for it, took no step and gave /start_profile no answer."""
    if folder:
        importlib.import_module("torch.profiler")


class Profiler:
    """One trace at a time, into `folder` (--profiler-dir; "" refuses). `name` is the process's, for the file; `host` stands
    before the paths that are told."""

    def __init__(self, folder: str, name: str, host: str = "") -> None:
        self._folder, self._name, self._host = folder, name, host
        self._running: Any = None

    def handle(self, operation_id: OperationId, *, start: bool) -> OperationDone:
        """Begin or end a trace; what could not be done is in the answer's `error`."""
        if not self._folder:
            return OperationDone(operation_id, "there is no directory for traces (--profiler-dir)")
        if start == (self._running is not None):
            state = "is running already" if start else "is not running"
            return OperationDone(operation_id, f"{self._name}: the profiler {state}")
        try:
            return OperationDone(operation_id, paths=() if start and self._start() else (self._stop(),))
        except (OSError, RuntimeError) as error:
            self._running = None
            return OperationDone(operation_id, f"{self._name}: --profiler-dir {self._folder}: {error}")

    def _start(self) -> bool:
        import torch

        Path(self._folder).mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        self._running = profile
        return True

    def _stop(self) -> str:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profile, self._running = self._running, None
        profile.stop()
        path = Path(self._folder) / f"{self._name}.{time.time_ns() // 1_000_000}.pt.trace.json"
        profile.export_chrome_trace(str(path))
        return self._host + str(path.resolve())
