"""What POST /collective_rpc calls in every worker: methods of the worker extension (--worker-extension-cls), a class of the user's, and
the two that read weights again (weights/reload.py).

Owned by io.py; called by the stepper thread between two steps. An extension is trusted code, as a plug-in is.
"""

import importlib
from typing import Any

import msgspec
import structlog

from meshlm.protocol.operations import CallWorkers, OperationDone, OperationId
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.engine import Engine

_log = structlog.get_logger()
LOST = (
    "what it changes, weights too, is in the memory of these workers alone: one that is started anew after a death, a scaling or a "
    "sleep of level 2 loads the model's files; the prefix cache is forgotten at each call"
)
NONE = "start the server with --worker-extension-cls to have methods that can be called"


def kind_of(name: str) -> Any:
    """The class `module.Class` or `module:Class`. ProcessFatal where there is none."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module may raise anything, and the user must read whose it is
        raise _failed(name, error) from None


def _failed(name: str, error: Exception) -> ProcessFatal:
    return ProcessFatal(f"--worker-extension-cls {name}: {type(error).__name__}: {error}".splitlines()[0])


class Extension:
    """One object of the class, where there is one, with the attributes `engine`, `rank` (the worker's number in the mesh) and, where
    the engine has them, `model` and `device`."""

    def __init__(self, name: str, engine: Engine, rank: int) -> None:
        """name: `module.Class` or `module:Class`; empty: there is no class. ProcessFatal."""
        self._engine, self._has_warned = engine, False
        self._made: Any = None
        if not name:
            return
        kind = kind_of(name)
        try:
            self._made = kind()
            self._made.engine, self._made.rank = engine, rank
            for shown in ("model", "device"):
                setattr(self._made, shown, getattr(engine, shown, None))
        except Exception as error:  # it may raise anything, and the user must read whose it is
            raise _failed(name, error) from None

    def _warn(self) -> None:
        """Once in the mesh's log: nobody but this worker knows what its method does."""
        if not self._has_warned and self._made.rank == 0:
            _log.warning("a worker extension was called", note=LOST)
        self._has_warned = True

    def call(self, operation_id: OperationId, asked: CallWorkers) -> OperationDone:
        """Its result as JSON, what JSON has not as text; or what went wrong."""
        if asked.method in ("verify_weights", "reload_weights"):
            from meshlm.workers.weights import reload  # torch

            error = reload.of_engine(self._engine, only_verify=asked.method == "verify_weights")
            return OperationDone(operation_id, error, results=() if error else (b"null",))
        if self._made is None:
            return OperationDone(operation_id, NONE)
        kind = type(self._made).__name__
        method = None if asked.method.startswith("_") else getattr(type(self._made), asked.method, None)
        if not callable(method):
            return OperationDone(operation_id, f"method: {kind} has no {asked.method!r}")
        self._warn()
        try:
            given = msgspec.json.decode(asked.arguments)
            result = method(self._made, *given["args"], **given["kwargs"])
            return OperationDone(operation_id, results=(msgspec.json.encode(result, enc_hook=str),))
        except Exception as error:  # the user's code may raise anything; the worker goes on
            _log.exception("worker extension failed", method=asked.method)
            return OperationDone(operation_id, f"{kind}.{asked.method}: {type(error).__name__}: {error}")
