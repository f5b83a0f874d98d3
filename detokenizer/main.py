"""Wires the detokenizer process: its App into the runtime."""

from typing import NoReturn

from meshlm.detokenizer.io import DetokenizerApp, load_ahead
from meshlm.protocol.wire.ids import Role
from meshlm.runtime.process import process


def main() -> NoReturn:
    process.main(Role.DETOKENIZER, DetokenizerApp, load_ahead=load_ahead)
