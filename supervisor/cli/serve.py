"""`meshlm serve`: start the whole mesh, keep it alive, end it in good order."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import setproctitle
import uvloop
from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig, Resolved, ServerConfig
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime import tls
from meshlm.runtime.api_keys import KeyFileError, read_file
from meshlm.runtime.process import logs, streams
from meshlm.supervisor import io, taking_over
from meshlm.supervisor.cli import plan
from meshlm.supervisor.cli.display import StartDisplay
from meshlm.supervisor.errors import UsageError, raised_as
from meshlm.supervisor.group.succession import MeshState
from meshlm.supervisor.nodes import joining
from meshlm.supervisor.processes import rundir, state_file
from meshlm.supervisor.settings import addresses, flag_rules, flags, node_rules, placement, resolve, rules, vllm_env
from meshlm.supervisor.succession import Succession


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    description = "Serve a model to OpenAI-style HTTP clients."
    parser = commands.add_parser("serve", help="serve a model over HTTP", description=description)
    flags.add_flags(parser, from_file=True)
    dry = "start nothing: print the resolved configuration, the memory, and which processes would start; refuse what a start would"
    parser.add_argument("--dry-run", nargs="?", const="text", choices=("text", "json"), help=dry)


def run(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    return dry_run(config, arguments.dry_run) if arguments.dry_run else run_mesh(config)


def dry_run(config: MeshConfig, form: str) -> int:
    """Print what would be started. UsageError and StartError as a start would have them, but for what is known when the weights are
    read, or a GPU has computed."""
    node_rules.check_nodes(config)
    if not config.network.headless:
        resolve.claim_port(config.server.address, config.server.port).close()
    config = resolve.for_mesh(config)
    rules.check(flag_rules.audio(config))
    if form == "json":
        sys.stdout.write(plan.as_json(config, run_dir(config)).decode() + "\n")
    else:
        print("\n".join(plan.lines(config, run_dir(config))))
    sys.stdout.flush()
    plan.check(config)
    return 0


def config_of(arguments: argparse.Namespace) -> MeshConfig:
    """The configuration that the flags, the file and the environment say."""
    # Until the supervisor has its own: nothing runs, what was made is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = flags.build(vars(arguments), arguments.config, vllm_env.settings_of(os.environ))
    if config.run.log_format == "json":
        streams.json_from_here()
    if idle := vllm_env.without_effect(os.environ):
        streams.complain(f"meshlm: {idle}", "warning")
    if idle := of_the_head(config):
        why = "without effect on a --headless node, since the head alone serves HTTP"
        streams.complain(f"meshlm: {why}: {idle}", "warning")
    return with_files(with_keys(config))


def of_the_head(config: MeshConfig) -> str:
    """The flags of a headless node that only the head heeds, in one line; "" where there are none."""
    asked = [one for one in flags.settings() if one.section == "server" and config.network.headless]
    return ", ".join(one.flag for one in asked if getattr(config.server, one.name) != one.default)


def run_mesh(config: MeshConfig, *, renders_only: bool = False) -> int:
    """Runs all processes of this node until they end; of a mesh that only renders, those that need no model."""
    node_rules.check_nodes(config)
    path = run_dir(config)
    if state_file.has_orphans(path):
        with rundir.taken_over(path) as left:
            run_left(taking_over.checked(left, config, path, renders_only=renders_only), config)
    else:
        resolve.fitting(lambda at_most: _run_mesh(config, renders_only, at_most))
    return 0


def run_left(left: MeshState, given: MeshConfig, *, end: bool = False) -> None:
    """Runs the processes that another supervisor left, until they end; `end`: they are to do so at once. The keys are those of `given`.
    The run directory is locked."""
    setproctitle.setproctitle("meshlm: supervisor")
    config = state_file.with_keys_of(left.config, given)
    with resolve.claim_again(config.server.address, config.server.port):
        me, succession = Identity(Role.SUPERVISOR), Succession(left.asked, left)
        logs.configure(config.run, identity=me)
        logs.keep(Path(config.run.run_dir), me, succession.incarnation)
        display = StartDisplay(process="supervisor" if config.run.log_format == "json" else None)
        display.line(taking_over.said(left))
        limit_s = config.run.drain_timeout if end else taking_over.drain_s(left, time.time())
        uvloop.run(_serve(config, display, succession, limit_s))


def _run_mesh(config: MeshConfig, renders_only: bool, at_most: int | None) -> None:
    asked = config
    setproctitle.setproctitle("meshlm: supervisor")  # a key among the arguments is nobody's business in `ps`
    headless = config.network.headless
    with contextlib.nullcontext() if headless else resolve.claim_port(config.server.address, config.server.port):
        config = resolve.for_mesh(config, at_most)
        rules.check(flag_rules.audio(config))
        if renders_only:
            config = replace(config, resolved=replace(config.require_resolved(), renders_only=True))
        if not config.run.run_dir:
            rundir.remove_dead(rundir.base_dir(os.environ))
        with rundir.taken(run_dir(config)) as path:
            config = replace(config, run=replace(config.run, run_dir=str(path)))
            me = Identity(Role.SUPERVISOR, placement.node_index(config))
            logs.configure(config.run, identity=me)
            logs.keep(path, me, time.time_ns())
            display = StartDisplay(process="supervisor" if config.run.log_format == "json" else None)
            until = time.monotonic() + config.run.startup_timeout
            if headless:
                joining.wait_for_name(config.network.join, until, display)
            config = addresses.with_node(config)
            if headless:
                joining.wait_for_head(config, until, display)
            outlived = config.node is None and config.run.orphan_grace
            uvloop.run(_serve(config, display, Succession(asked if outlived else None)))


def with_keys(config: MeshConfig) -> MeshConfig:
    """The tree with the keys of the flags, the file or the environment. UsageError for an empty one: anybody could have it."""
    keys = config.server.api_key or vllm_env.api_keys(os.environ)
    admin = config.server.admin_api_key or vllm_env.api_keys(os.environ, vllm_env.ADMIN_API_KEYS)
    for key in keys:
        vllm_env.check_key("--api-key", key)
    for key in admin:
        vllm_env.check_key("--admin-api-key", key)
        if key in keys:
            raise UsageError("--admin-api-key: the same key is one of --api-key, and would be for admin too")
    return replace(config, server=replace(config.server, api_key=keys, admin_api_key=admin))


def with_files(config: MeshConfig) -> MeshConfig:
    """The tree with whole paths of certificates and keys. UsageError for files that cannot be used."""
    named = ("api_key_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    paths = {name: str(Path(path).absolute()) for name in named if (path := getattr(config.server, name))}
    server = replace(config.server, **paths)
    with raised_as(UsageError, tls.TLSError, KeyFileError):
        tls.make_context(server)
        if server.api_key_file:
            read_file(server.api_key_file)
    return replace(config, server=server)


def run_dir(config: MeshConfig) -> Path:
    """The one that was asked for, or this user's for this port."""
    if config.run.run_dir:
        return Path(config.run.run_dir)
    base = rundir.base_dir(os.environ)
    return base / (f"node-{placement.node_index(config)}" if config.network.headless else str(config.server.port))


async def _serve(
    config: MeshConfig, display: StartDisplay, succession: Succession, stops_in_s: float | None = None
) -> None:
    """`stops_in_s`: what is taken over is to end, with so long for the requests that run."""
    supervisor = io.Supervisor(config, placement.identities(config), display, succession)
    loop = asyncio.get_running_loop()
    stopping = 0

    def on_signal() -> None:
        nonlocal stopping
        stopping += 1
        if stopping == 1:
            limit = f"up to {config.run.drain_timeout:.0f} s for running requests"
            display.line(f"stopping: {limit}; again to stop at once")
            supervisor.stop()
        else:
            supervisor.kill()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:  # `nohup` has it ignored
            loop.add_signal_handler(number, on_signal)
    if succession.left is None:
        _say_start(config, display)
    try:
        await supervisor.start()
        if stops_in_s is not None:
            supervisor.stop(stops_in_s)
        announce = loop.create_task(_announce(supervisor, display, is_successor=succession.left is not None))
        await supervisor.ended
        announce.cancel()
    finally:
        await supervisor.close()


def _say_start(config: MeshConfig, display: StartDisplay) -> None:
    of = config.require_resolved()
    exact = ", deterministic" if config.worker.deterministic else ""
    display.line(f"starting {of.served_names[0]} on {of.device} in {of.dtype}{exact}{_instead_of_text(of)}")


async def _announce(supervisor: io.Supervisor, display: StartDisplay, *, is_successor: bool) -> None:
    await supervisor.ready.wait()
    if supervisor.config.network.headless:
        display.line(f"ready: this node serves for {supervisor.config.network.join}   (Ctrl-C stops)")
        return
    server = supervisor.config.server
    host = "127.0.0.1" if server.address in ("0.0.0.0", "::") else server.address
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if server.ssl_certfile else "http"
    address = f"{host}:{server.port} (gRPC)" if server.grpc else f"{scheme}://{host}:{server.port}/v1"
    if is_successor:
        display.line(f"ready: {address}   (kill {os.getpid()} stops)")
        return
    if not server.has_keys:
        display.line(*_who_reaches(server))
    if not server.has_api_keys and "*" in server.cors_origins:
        text = "no API key is set and --allowed-origins has *: every web page may use the server"
        display.line(f"warning: {text}", "warning")
    display.line(f"ready: {address}   (Ctrl-C stops)")


def _instead_of_text(resolved: Resolved) -> str:
    """What the server does for clients, where it does not go on with texts."""
    if resolved.speech is not None:
        return ": it transcribes audio, and takes no completions"
    if resolved.pooling is not None:
        return f": it gives vectors ({', '.join(resolved.pooling.tasks)}), and takes no completions"
    return ""


def _who_reaches(server: ServerConfig) -> tuple[str, str]:
    """A line about a server without a key, and its level."""
    if server.is_local:
        text = "no API key is set: only this host is served. --api-key or MESHLM_API_KEY opens it to others, --host 0.0.0.0 to all"
        return text, "info"
    text = f"no API key is set, and whoever reaches {server.address}:{server.port} may use the server"
    return f"warning: {text}: set MESHLM_API_KEY, or leave --host out", "warning"
