"""`meshlm run-batch`: answers a file of requests with a mesh of its own, which ends with it, or by a server that runs.

The mesh is that of `meshlm serve`, with its flags. It listens on this host alone, on a free port and with a key that nobody knows,
unless --enable-metrics asks for --host and --port.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import setproctitle
import uvloop
from msgspec.structs import replace
from tqdm import tqdm

from meshlm.protocol.config import MeshConfig
from meshlm.runtime.process import logs, streams
from meshlm.supervisor import batch, io
from meshlm.supervisor.api.background import unless_ended
from meshlm.supervisor.api.llm import OFFLINE
from meshlm.supervisor.batch import Counts
from meshlm.supervisor.cli import serve
from meshlm.supervisor.cli.display import StartDisplay
from meshlm.supervisor.cli.terminal import Server
from meshlm.supervisor.errors import UsageError, raised_as
from meshlm.supervisor.processes import rundir
from meshlm.supervisor.settings import addresses, flags, node_rules, placement, resolve, vllm_env

LOOPBACK = "127.0.0.1"
STOP_S = 10.0
TOO_EARLY = "the mesh has ended before its requests"
Work = Callable[[Server, threading.Event], int]
ALL_AT_ONCE = {**OFFLINE, "disable_log_requests": True, "retry_window": 600.0}  # each answer is in the file


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    about = "Answer OpenAI's batch files: JSON lines to JSON lines."
    parser = commands.add_parser("run-batch", help="answer a file of requests", description=about)
    flags.add_flags(parser, from_file=True)
    parser.add_argument("-i", "--input-file", required=True, help="file of requests, or its http(s) address (GET)")
    parser.add_argument("-o", "--output-file", required=True, help="file for the answers, or its http(s) address (PUT)")
    parser.add_argument("--output-tmp-dir", help="folder that holds the answers until they are PUT")
    metrics = "serve GET /metrics, and all else, at --host and --port"
    parser.add_argument("--enable-metrics", action="store_true", help=metrics)
    parser.add_argument("--url", help=argparse.SUPPRESS)  # vLLM's older name of --host
    parser.add_argument("--server", help="a server that runs, http://host:port, instead of a mesh of its own")


def run(arguments: argparse.Namespace) -> int:
    if arguments.server is not None:
        with raised_as(UsageError, ValueError, of=f"--server {arguments.server}"):
            server = Server.of(arguments.server, key_of(arguments))
        return _answer(arguments, server)
    return with_own_mesh(arguments, partial(_answer, arguments))


def with_own_mesh(arguments: argparse.Namespace, work: Work) -> int:
    """What `work` gives, called in a thread with a mesh of these flags, which ends with it. StartError, UsageError."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = _config(arguments)
    if config.run.log_format == "json":
        streams.json_from_here()
    node_rules.check_alone(config)
    setproctitle.setproctitle("meshlm: supervisor")
    return resolve.fitting(lambda at_most: _with_mesh(config, work, at_most))


def _with_mesh(config: MeshConfig, work: Work, at_most: int | None) -> int:
    host = config.server.address
    with resolve.claim_port(host, config.server.port):
        config = resolve.for_mesh(config, at_most)
        base = rundir.base_dir(os.environ)
        rundir.remove_dead(base)
        with rundir.taken(base / f"{rundir.LLM_PREFIX}{secrets.token_hex(4)}") as path:
            config = replace(config, run=replace(config.run, run_dir=str(path)))
            logs.configure(config.run)
            display = StartDisplay(process="supervisor" if config.run.log_format == "json" else None)
            code: int = uvloop.run(_run(work, addresses.with_node(config), display))
            return code


def _config(arguments: argparse.Namespace) -> MeshConfig:
    environment = {**ALL_AT_ONCE, **vllm_env.settings_of(os.environ)}
    given: dict[str, Any] = vars(arguments)
    if arguments.enable_metrics and arguments.url:
        given = {"host": arguments.url, **given}
    config = flags.build(given, arguments.config, environment)
    if idle := vllm_env.without_effect(os.environ):
        streams.complain(f"meshlm: {idle}", "warning")
    for name in ("api_key_file", "ssl_certfile"):
        if getattr(config.server, name):
            flag, why = f"--{name.replace('_', '-')}", "this command asks its mesh over plain HTTP"
            raise UsageError(f"{flag}: it is for `meshlm serve`; {why}")
    if arguments.enable_metrics:
        return serve.with_keys(config)
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    return replace(config, server=replace(config.server, host=LOOPBACK, port=port, api_key=(secrets.token_hex(16),)))


def key_of(arguments: argparse.Namespace) -> str:
    """The key for a server that runs: the flag's or the environment's."""
    return next(iter(getattr(arguments, "api_key", None) or vllm_env.api_keys(os.environ)), "")


async def _run(work: Work, config: MeshConfig, display: StartDisplay) -> int:
    supervisor = io.Supervisor(config, placement.identities(config), display)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop, 0.0)
    server, ended = config.server, threading.Event()
    host = LOOPBACK if server.address in ("0.0.0.0", "::") else server.address
    there = Server(False, host, server.port, "", next(iter(server.api_key), ""))
    try:
        await supervisor.start()
        await unless_ended(supervisor, supervisor.ready.wait(), TOO_EARLY)
        return await unless_ended(supervisor, asyncio.to_thread(work, there, ended), TOO_EARLY)
    finally:
        ended.set()
        supervisor.stop(0.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(supervisor.ended), STOP_S)
        await supervisor.close()


def _answer(arguments: argparse.Namespace, server: Server, ended: threading.Event | None = None) -> int:
    """Answers the file, and says how many lines were answered; 1 where any was not."""
    with (
        batch.requests(arguments.input_file) as source,
        batch.answers(arguments.output_file, arguments.output_tmp_dir) as out,
        tqdm(desc="Running batch", unit="req", mininterval=5, disable=None) as bar,
    ):

        def told(_: Counts) -> None:
            bar.update()

        counts = batch.run(source, out, server, told, ended)
    said = f"{counts.answered} requests answered, {counts.failed} with an error: {arguments.output_file}"
    print(said, file=sys.stderr)
    return 1 if counts.failed else 0
