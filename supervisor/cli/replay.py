"""`meshlm replay`: computes requests that --record-requests has written again, and says where their tokens differ.

They are asked of a server that runs, or of a mesh of their own as `meshlm run-batch` has it.
"""

import argparse
import os
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from meshlm.supervisor import control, replay
from meshlm.supervisor.cli import run_batch, status
from meshlm.supervisor.cli.terminal import Server
from meshlm.supervisor.errors import StartError, UsageError, raised_as
from meshlm.supervisor.replay import DIFFERS, NOT_ANSWERED, SAME, SKIPPED
from meshlm.supervisor.settings import flags

OF_SERVER = ("host", "port", "api_key", "run_dir")  # settings that say which server is asked


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "replay",
        help="compute recorded requests again, and say where they differ",
        description="Computes requests that --record-requests has written again, token by token. Exit code 0: all are the same, "
        "1: some differ, 2: some could not be asked.",
    )
    parser.add_argument("what", metavar="ID|FILE", help="a file or folder of recordings, or the id of a request")
    parser.add_argument("--recordings", help="file or folder that has the ID; default: the running mesh's folder")
    parser.add_argument("--url", help="the server; default: --host and --port; with MODEL a mesh of its own")
    flags.add_flags(parser, from_file=True)
    parser.set_defaults(enable_metrics=False)


def run(arguments: argparse.Namespace) -> int:
    try:
        path, wanted = _recordings(arguments)
        models = {one.body["model"] for one in replay.read(path, wanted)}
        if not models:
            raise UsageError(f"{path}: no request {wanted} is recorded there" if wanted else f"{path}: no requests")
        work = partial(_replay, path, wanted, models)
        if "model" in arguments:
            if arguments.url is not None:
                raise UsageError("--url: a server, or MODEL for a mesh of its own; not both")
            return run_batch.with_own_mesh(arguments, work)
        return work(_server(arguments))
    except StartError as error:
        raise UsageError(str(error)) from None  # 1 is the exit code of a difference


def _recordings(arguments: argparse.Namespace) -> tuple[Path, str]:
    """The file or folder, and the id that is looked for in it, "" for all."""
    given: dict[str, Any] = vars(arguments)
    if arguments.recordings is not None:
        return Path(arguments.recordings), arguments.what
    path = Path(arguments.what)
    if os.path.exists(path):
        return path, ""
    if path.suffix == ".jsonl" or len(path.parts) > 1:
        raise UsageError(f"{path}: there is no such file")
    found = control.request(status.find(given.get("port"), given.get("run_dir")), {"command": "status"})
    mesh = msgspec.convert(found, control.MeshStatus)
    if not mesh.record_requests:
        raise UsageError(f"{path}: the mesh on port {mesh.port} was started without --record-requests")
    arguments.port = mesh.port
    return Path(mesh.record_requests), arguments.what


def _server(arguments: argparse.Namespace) -> Server:
    given: dict[str, Any] = vars(arguments)
    of_mesh = [setting.flag for setting in flags.settings() if setting.name in given and setting.name not in OF_SERVER]
    if of_mesh or arguments.config is not None:
        raise UsageError(f"{of_mesh[0] if of_mesh else '--config'}: it is for a mesh of its own, which needs MODEL")
    host = given.get("host") or run_batch.LOOPBACK
    url = arguments.url or f"http://{f'[{host}]' if ':' in host else host}:{given.get('port', 8000)}"
    with raised_as(UsageError, ValueError, of=f"--url {url}"):
        server = Server.of(url, run_batch.key_of(arguments))
    return server._replace(base=server.base.removesuffix("/v1"))


def _replay(path: Path, wanted: str, models: set[str], server: Server, ended: threading.Event | None = None) -> int:
    replay.check_models(server, models)
    counts, fingerprints = Counter[str](), set[tuple[str, str]]()
    for sequence, outcome in replay.Replay(server, ended).outcomes(replay.read(path, wanted)):
        counts[outcome.kind] += 1
        then, now = outcome.fingerprints
        if then and now and then != now:
            fingerprints.add((then, now))
        print(f"{sequence.custom_id}: {outcome.text}", flush=True)
    for then, now in sorted(fingerprints):
        print(f"recorded by {then}, computed by {now} (system_fingerprint)", file=sys.stderr)
    print(", ".join(f"{counts[kind]} {kind}" for kind in (SAME, DIFFERS, NOT_ANSWERED, SKIPPED) if counts[kind]))
    return 1 if counts[DIFFERS] else 2 if counts[NOT_ANSWERED] or not counts[SAME] else 0
