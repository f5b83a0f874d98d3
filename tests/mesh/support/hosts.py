"""Two hosts on one: the head here, a node behind a link that can be cut, restored and delayed.

`ProxyLink` needs no rights: each side binds one loopback address and is reached by another, where a proxy listens. `NamespaceLink`
puts the node into a network namespace of its own, behind a veth pair.
"""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import httpx
from fake_answers import reference
from serving import MESHLM, Serving
from waiting import free_ports

HEAD, HEAD_SEEN, NODE, NODE_SEEN = "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"
PORTS = 12
LIMIT_S = 40


class Sides(Protocol):
    """How the two sides are started."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """Of the node's command line."""
        ...

    @property
    def head_flags(self) -> tuple[str, ...]: ...
    @property
    def node_flags(self) -> tuple[str, ...]: ...


class Link(Sides, Protocol):
    """What happens to the link between them, too."""

    def cut(self) -> None: ...
    def restore(self) -> None: ...


class Proxy:
    """Carries bytes from `seen`:port to `real`:port. While it is cut it accepts, reads and carries nothing, as a dead wire."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def carry(self, seen: str, real: str, port: int) -> None:
        asyncio.run_coroutine_threadsafe(self._listen(seen, real, port), self._loop).result(10)

    async def _listen(self, seen: str, real: str, port: int) -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._open.wait()
                there, back = await asyncio.open_connection(real, port)
                with contextlib.closing(back):
                    await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
            writer.close()

        self._servers.append(await asyncio.start_server(connected, seen, port))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """In order, each piece `delay_s` after it came."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

        async def write() -> None:
            while True:
                due, data = await pieces.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self._open.wait()
                if not data:
                    return writer.close()
                writer.write(data)
                await writer.drain()

        async def read() -> None:
            while True:
                await self._open.wait()
                data = await reader.read(1 << 16)
                pieces.put_nowait((loop.time() + self.delay_s, data))
                if not data:
                    return

        await asyncio.gather(read(), write())

    def set_open(self, is_open: bool) -> None:
        self._loop.call_soon_threadsafe(self._open.set if is_open else self._open.clear)

    def close(self) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class ProxyLink:
    """Loopback addresses and a proxy."""

    def __init__(self) -> None:
        self.prefix: tuple[str, ...] = ()
        self.proxy = Proxy()
        head, node = free_ports(PORTS, HEAD, HEAD_SEEN), free_ports(PORTS, NODE, NODE_SEEN)
        self.head_flags = (
            *("--listen", f"tcp://{HEAD}:{head}", "--advertise-host", HEAD_SEEN),
            *("--mesh-port-range", f"{head + 2}-{head + PORTS - 1}"),
        )
        self.node_flags = (
            *("--join", f"tcp://{HEAD_SEEN}:{head}", "--advertise-host", NODE_SEEN),
            *("--listen", f"tcp://{NODE}:{node}", "--mesh-port-range", f"{node}-{node + PORTS - 1}"),
        )
        for port in range(PORTS):
            self.proxy.carry(HEAD_SEEN, HEAD, head + port)
            self.proxy.carry(NODE_SEEN, NODE, node + port)

    def cut(self) -> None:
        self.proxy.set_open(False)

    def restore(self) -> None:
        self.proxy.set_open(True)

    def close(self) -> None:
        self.restore()
        self.proxy.close()


class LoopbackLink:
    """Two addresses of the loopback interface, and nothing that could be cut."""

    def __init__(self) -> None:
        self.prefix: tuple[str, ...] = ()
        self.address = HEAD
        port = free_ports(PORTS, HEAD)
        self.head_flags = ("--listen", f"tcp://{HEAD}:{port}")
        self.node_flags = ("--join", f"tcp://{HEAD}:{port}", "--listen", f"tcp://{NODE}:{free_ports(PORTS, NODE)}")


class NamespaceLink:
    """A network namespace; needs the right to make one."""

    def __init__(self) -> None:
        number = os.getpid() % 250
        self._name, self._here, self._there = f"mlm{os.getpid()}", f"mlh{os.getpid()}", f"mln{os.getpid()}"
        head, node = f"10.213.{number}.1", f"10.213.{number}.2"
        self.address = head
        port = free_ports(PORTS, HEAD)
        self.prefix = ("ip", "netns", "exec", self._name)
        self.head_flags = ("--listen", f"tcp://{head}:{port}")
        self.node_flags = ("--join", f"tcp://{head}:{port}")
        _ip("netns", "add", self._name)
        _ip("link", "add", self._here, "type", "veth", "peer", "name", self._there, "netns", self._name)
        _ip("addr", "add", f"{head}/24", "dev", self._here)
        _ip("link", "set", self._here, "up")
        _ip("-n", self._name, "addr", "add", f"{node}/24", "dev", self._there)
        _ip("-n", self._name, "link", "set", self._there, "up")
        _ip("-n", self._name, "link", "set", "lo", "up")

    def cut(self) -> None:
        _ip("-n", self._name, "link", "set", self._there, "down")

    def restore(self) -> None:
        _ip("-n", self._name, "link", "set", self._there, "up")

    def close(self) -> None:
        _ip("netns", "del", self._name)
        subprocess.run(["ip", "link", "del", self._here], capture_output=True, check=False)  # it may be gone already


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=300)


def may_make_namespaces() -> bool:
    name = f"mlmtry{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


LINKS = ["proxy", "netns"] if may_make_namespaces() else ["proxy"]


@contextlib.contextmanager
def link_of(kind: str) -> Iterator[ProxyLink | NamespaceLink]:
    link = ProxyLink() if kind == "proxy" else NamespaceLink()
    try:
        yield link
    finally:
        link.close()


def head(link: Sides, key_file: str, *flags: str) -> Serving:
    return Serving("--device", "fake", "-dp", "2", "--key-file", key_file, *link.head_flags, *flags)


def node(link: Sides, key_file: str, *flags: str) -> Serving:
    return Serving(
        *("--device", "fake", "-dp", "2", "--headless", "--key-file", key_file, *link.node_flags, *flags),
        prefix=link.prefix,
    )


# --- what tests ask of them ---


def made_keys(path: Path) -> str:
    subprocess.run([MESHLM, "keys", str(path)], check=True, capture_output=True, cwd="/")
    return str(path)


def stream(
    server: Serving, prompt: list[int], count: int, begun: Callable[[], None] = lambda: None, **fields: object
) -> list[int]:
    """The token ids of a streamed completion that ends as it should. `begun` is called at each piece."""
    asked = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "return_token_ids": True, "stream": True}
    body = {**asked, **fields}
    ids: list[int] = []
    reasons: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                ids += choice["token_ids"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                begun()
    assert reasons == ["length"]
    return ids


def on_rank(server: Serving, rank: int, count: int = 8) -> list[int]:
    """Token ids from one rank, which must serve within the limit."""
    prompt = [random.randrange(300, 40_000) for _ in range(20)]
    body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}, timeout=LIMIT_S
    )
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    assert ids == reference(prompt, count)
    return ids


def states(server: Serving) -> dict[str, str]:
    return {f"{process['role']}/{process['index']}": process["state"] for process in server.status()["processes"]}
