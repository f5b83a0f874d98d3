"""Wires the frontend process: its App into the runtime."""

import sys
from typing import NoReturn

from meshlm.frontend.io import FrontendApp
from meshlm.protocol.wire.ids import Role
from meshlm.runtime.process import process

# Threads make long answers. After each call of its own that lets them run (a send, a receive) the loop waits so long for them: with
# Python's 5 ms a turn of six such calls takes 30 ms.
SWITCH_S = 0.0005


def main() -> NoReturn:
    sys.setswitchinterval(SWITCH_S)
    process.main(Role.FRONTEND, FrontendApp)
