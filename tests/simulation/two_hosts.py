"""In the place of runtime/mesh/tcp.py, the keys, and threads: what runtime/mesh/remote.py and workers/io.py find in a simulated
world."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

from meshlm.protocol.config import NetworkConfig
from meshlm.runtime.mesh import tcp as real

if TYPE_CHECKING:
    from network import Inbox

HEAD_PORT = 5600
FREE_PORT = 10_000  # the first of those that are given to whoever asks for any


def address_of(host: int) -> str:
    return f"10.0.0.{host + 1}"


class _Tcp:
    def __init__(self, host: str, keys: object, config: NetworkConfig) -> None:
        self._host = host
        self.prepare = None

    def bind(self, inbox: "Inbox", port: int) -> str:
        world = inbox.process.world
        world.num_ports += 1
        return real.join(self._host, port or FREE_PORT + world.num_ports)


class _Doorman:
    def __init__(self, *_: object) -> None: ...
    def start(self, loop: object) -> None: ...


class Strangers:
    """There are none."""

    def __init__(self, log: object) -> None: ...
    def watch(self, sock: object, loop: object) -> None: ...
    def close(self) -> None: ...


class _Thread:
    """Calls its target at once: what a simulated worker does there is but to begin."""

    def __init__(self, target: Callable[..., None], args: tuple[object, ...] = (), **_: object) -> None:
        self._target, self._arguments = target, args

    def start(self) -> None:
        self._target(*self._arguments)


tcp = SimpleNamespace(Tcp=_Tcp, Doorman=_Doorman, parse=real.parse, join=real.join, AddressError=real.AddressError)
keys = SimpleNamespace(load=lambda path: SimpleNamespace(public=b""), KeyFileError=ValueError)
threading = SimpleNamespace(Thread=_Thread)
