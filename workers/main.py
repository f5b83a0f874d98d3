"""Wires the worker process: its App into the runtime."""

from typing import NoReturn

from meshlm.protocol.ids import Role
from meshlm.runtime import process
from meshlm.workers.io import WorkerApp


def main() -> NoReturn:
    process.main(Role.WORKER, WorkerApp)
