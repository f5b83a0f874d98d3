"""Wires the coordinator process: its App into the runtime."""

from typing import NoReturn

from meshlm.coordinator.io import CoordinatorApp
from meshlm.protocol.wire.ids import Role
from meshlm.runtime.process import process


def main() -> NoReturn:
    process.main(Role.COORDINATOR, CoordinatorApp)
