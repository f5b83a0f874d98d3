"""A plug-in of `meshlm.general` that has one process after the other die of certain prompts, as a bug in a library would.

The prompt [POISON, n] kills the n-th process of KILLS that has it in hand. Put on a mesh's path by `install`.
"""

import os
import shutil
import signal
import struct
import sys
from pathlib import Path
from typing import Any

POISON = 777
FAILS = 100  # [POISON, FAILS] fails its steps, and kills nobody
KILLS = ("frontend", "detokenizer", "coordinator", "scheduler", "scheduler that plans", "worker")


def install(folder: Path) -> Path:
    """A folder for PYTHONPATH with this as an installed package."""
    shutil.copy(__file__, folder / "poison_plugin.py")
    info = folder / "poison_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: poison-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[meshlm.general]\npoison = poison_plugin:arm\n")
    return folder


def _dies(of: str, token_ids: bytes) -> None:
    if of == "worker" and token_ids.startswith(struct.pack("<ii", POISON, FAILS)):
        raise IndexError("a row's parameters")
    if token_ids.startswith(struct.pack("<ii", POISON, KILLS.index(of))):
        os.kill(os.getpid(), signal.SIGSEGV)


def _before(owner: type, name: str, of: str, tokens: Any) -> None:
    """Have `owner.name` look at the prompts of its argument first."""
    do = getattr(owner, name)

    def armed(self: object, *arguments: Any, **named: Any) -> Any:
        for token_ids in tokens(*arguments):
            _dies(of, token_ids)
        return do(self, *arguments, **named)

    setattr(owner, name, armed)


def arm() -> None:
    """In each process that a plug-in is run in: what it is, its command line says."""
    role = " ".join(sys.argv).partition("--identity ")[2].partition("/")[0]
    if role == "frontend":
        from meshlm.frontend.requests.request_reader import RequestReader

        wanted = f'"prompt":[{POISON},{KILLS.index(role)}'.encode()
        kill = struct.pack("<ii", POISON, KILLS.index(role))
        _before(
            RequestReader, "completion", role, lambda request, raw: [kill] if wanted in raw.replace(b" ", b"") else []
        )
    elif role == "detokenizer":
        from meshlm.detokenizer.io import DetokenizerApp

        _before(DetokenizerApp, "_encode_now", role, lambda ask: [getattr(ask.prompt, "token_ids", b"")])
    elif role == "coordinator":
        from meshlm.coordinator.core import Coordinator

        _before(Coordinator, "_admit", role, lambda sender, life, admit, now: [admit.work.prompt_token_ids])
    elif role == "scheduler":
        from meshlm.scheduler_proc.kv.cache import KVCache
        from meshlm.scheduler_proc.request_table import RequestTable

        _before(RequestTable, "assign", role, lambda assign, output: [assign.work.prompt_token_ids])
        _before(KVCache, "match", "scheduler that plans", lambda request: [request.work.prompt_token_ids])
    elif role == "worker":
        from meshlm.workers.fake.engine import FakeEngine

        _before(FakeEngine, "step", role, lambda plan, received_ns: [new.token_ids for new in plan.new_rows])
