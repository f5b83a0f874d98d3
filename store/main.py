"""Wires the store process: its App into the runtime."""

from typing import NoReturn

from meshlm.protocol.wire.ids import Role
from meshlm.runtime.process import process
from meshlm.store.io import StoreApp


def main() -> NoReturn:
    process.main(Role.STORE, StoreApp)
