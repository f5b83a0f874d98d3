"""`meshlm launch ROLE`: one more process for a mesh that runs on this host; `meshlm launch render`: a mesh without a model.

A process takes the mesh's own configuration, joins through the coordinator and runs in the foreground; the supervisor does not
restart it. It ends with this command, and with the mesh, but outlives the supervisor as others do. A mesh that renders has HTTP and
text processes alone: templates and tokens, there and back (frontend/rendering), with the flags of `meshlm serve` and on any computer.
"""

import argparse
import asyncio
import contextlib
import signal
import socket
import time
from pathlib import Path

import msgspec

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime.process.streams import complain, json_from_here
from meshlm.supervisor import control
from meshlm.supervisor.cli import serve, status
from meshlm.supervisor.errors import StartError, UsageError
from meshlm.supervisor.processes import children, state_file
from meshlm.supervisor.settings import flags

AGAIN_S = 0.2  # until the next supervisor is asked again
ROLES = (Role.FRONTEND, Role.DETOKENIZER)
"""Roles that may be added while a mesh runs; schedulers and workers come in whole ranks."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("launch", help="add one process to a running mesh")
    roles = parser.add_subparsers(dest="role", metavar="ROLE", required=True)
    for role in ROLES:
        one = roles.add_parser(role.value, help="one more process for a running mesh")
        one.add_argument("--index", type=int, help="its number; default: the next free one")
        status.add_mesh_choice(one)
    render = roles.add_parser("render", help="serve templates and tokens without a model")
    flags.add_flags(render, from_file=True)
    render.set_defaults(run=_render)


def _render(arguments: argparse.Namespace) -> int:
    config = serve.config_of(arguments)
    if config.network.headless or config.network.listen:
        raise UsageError("launch render: no rank is there, on this node or another (--headless, --listen)")
    worker = msgspec.structs.replace(config.worker, device="fake")  # nothing is asked of a GPU
    return serve.run_mesh(msgspec.structs.replace(config, worker=worker), renders_only=True)


def run(arguments: argparse.Namespace) -> int:
    run_dir = status.find(arguments.port, arguments.run_dir, or_root=False)  # who has it says what runs
    mesh, identity, config = control.attach(run_dir, Role(arguments.role), arguments.index)
    if config.run.log_format == "json":
        json_from_here("launch")
    return asyncio.run(_run(identity, mesh, config, run_dir))


async def _run(identity: Identity, mesh: socket.socket, config: MeshConfig, run_dir: Path) -> int:
    """Waits until the process ends, by itself or by a signal, or the mesh does. Gives its exit code, 1 after a signal."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    child = children.Child(identity, Incarnation(time.time_ns()), config)
    child.watch(loop, lambda _, code: ended.set_result(code))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, child.send_signal, signal.SIGTERM)

    following = asyncio.create_task(_follow(mesh, identity, run_dir, config.run.orphan_grace))

    def mesh_has_ended(_: object) -> None:
        if not ended.done():
            complain(f"meshlm: the mesh has ended, and so does {identity}")
            child.kill()

    following.add_done_callback(mesh_has_ended)
    code = await ended
    following.cancel()
    return code if code >= 0 else 1


async def _follow(mesh: socket.socket, identity: Identity, run_dir: Path, grace_s: float) -> None:
    """Return when the mesh has ended. Where its supervisor alone has died the next one is told of the place."""
    loop = asyncio.get_running_loop()
    link: socket.socket | None = mesh
    while link is not None:
        link.setblocking(False)
        with contextlib.suppress(OSError):
            await loop.sock_recv(link, 1)  # it says no more: that is its end
        link.close()
        until, link = loop.time() + grace_s, None
        while link is None and loop.time() < until and await asyncio.to_thread(state_file.has_orphans, run_dir):
            try:
                link, _, _ = await asyncio.to_thread(control.attach, run_dir, identity.role, identity.index)
            except StartError:
                await asyncio.sleep(AGAIN_S)
