"""Wires the scheduler process: its App into the runtime."""

from typing import NoReturn

from meshlm.protocol.wire.ids import Role
from meshlm.runtime.process import process
from meshlm.scheduler_proc.io import SchedulerApp


def main() -> NoReturn:
    process.main(Role.SCHEDULER, SchedulerApp)
