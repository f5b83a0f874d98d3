"""Wires the media process: its App into the runtime."""

from typing import NoReturn

from meshlm.mediaproc.io import MediaApp
from meshlm.protocol.wire.ids import Role
from meshlm.runtime.process import process


def main() -> NoReturn:
    process.main(Role.MEDIA, MediaApp)
