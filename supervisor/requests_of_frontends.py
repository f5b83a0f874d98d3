"""Lets the frontends of a node tell one another of their requests, for the dashboard that one of them shows. Called by io.py."""

from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol.edges.control import AskRequests, FrontendRequests
from meshlm.protocol.wire.ids import Identity, Role


def pass_on(
    peer: Identity, message: Struct, frontends: Iterable[Identity], send: Callable[[Identity, Struct], bool]
) -> bool:
    """A question goes to all other frontends, an answer to the one that asked. False: the message is neither."""
    match message:
        case AskRequests():
            for other in frontends:
                if other != peer:
                    send(other, replace(message, asker=peer))
        case FrontendRequests() if message.asker.role is Role.FRONTEND:
            send(message.asker, message)
        case FrontendRequests():
            pass
        case _:
            return False
    return True
