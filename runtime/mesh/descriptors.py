"""How many sockets and file descriptors the links of a process take: asked for at its start, where it can say that they are too few."""

import resource

import zmq

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.channels import peers_of
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.mesh.newcomers import Newcomers

EACH_LINK = 3  # a socket's own descriptor, its connection, and the one that the peer makes
BESIDE = 128  # inboxes, logs, weights, the loop's own
MOST_RANKS = 1024  # to which a mesh may be scaled out while it runs


def num_links(me: Identity, config: MeshConfig) -> int:
    """The number of links to all places of the configuration."""
    places = dict(Newcomers(me, config).expected)
    if me.role is Role.SCHEDULER:
        places[Role.WORKER] = config.parallel.workers_per_rank
        places[Role.SCHEDULER] *= config.kv_transfer.shares_pages
    if me.role is Role.WORKER:
        places[Role.SCHEDULER] = 1
    return sum(places[role] for role in peers_of(me.role))


def max_sockets(me: Identity, config: MeshConfig) -> int:
    """The number of sockets of one ZeroMQ context, whose own default is 1,023."""
    later = MOST_RANKS * (1 + config.parallel.workers_per_rank)
    return num_links(me, config) + later + Newcomers(me, config).most + BESIDE


def context(me: Identity, config: MeshConfig) -> "zmq.Context[zmq.Socket[bytes]]":
    found: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    found.set(zmq.MAX_SOCKETS, min(max_sockets(me, config), int(found.get(zmq.SOCKET_LIMIT))))
    return found


def claim(me: Identity, config: MeshConfig) -> None:
    """Raise the soft limit to the hard one: it is there for programs that use select(). ProcessFatal when that is too low too."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = EACH_LINK * num_links(me, config) + BESIDE
    if hard != resource.RLIM_INFINITY and hard < needed:
        text = "raise the hard limit (ulimit -Hn, LimitNOFILE=)"
        raise ProcessFatal(f"{me} may open {hard} files, and its links need {needed}: {text}")
