"""Wires the frontend process: its App into the runtime."""

from typing import NoReturn

from meshlm.frontend.io import FrontendApp
from meshlm.protocol.ids import Role
from meshlm.runtime import process


def main() -> NoReturn:
    process.main(Role.FRONTEND, FrontendApp)
