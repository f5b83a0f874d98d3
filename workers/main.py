"""Wires the worker process: its App into the runtime."""

from typing import NoReturn

from meshlm.protocol.wire.ids import Role
from meshlm.runtime.process import process
from meshlm.workers.engines import load_ahead
from meshlm.workers.io import WorkerApp


def main() -> NoReturn:
    process.main(Role.WORKER, WorkerApp, load_ahead=load_ahead)
