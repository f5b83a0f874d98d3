"""Wires the detokenizer process: its App into the runtime."""

from typing import NoReturn

from meshlm.detokenizer.io import DetokenizerApp, load_ahead
from meshlm.protocol.ids import Role
from meshlm.runtime import process


def main() -> NoReturn:
    process.main(Role.DETOKENIZER, DetokenizerApp, load_ahead=load_ahead)
