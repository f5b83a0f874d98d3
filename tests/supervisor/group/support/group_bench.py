"""A small group and what happens to it."""

from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor.group.core import Group
from meshlm.supervisor.group.events import BecameReady, Effect, Exited, Start

FRONTEND, WORKER = Identity(Role.FRONTEND), Identity(Role.WORKER)
NEW, OTHER = Identity(Role.SCHEDULER, 1), Identity(Role.WORKER, 1)


def started(max_restarts: int = 3) -> Group:
    group = Group([FRONTEND, WORKER], max_restarts, 60.0)
    group.handle(Start(), 1000.0)
    return group


def ready(group: Group, identity: Identity, now: float = 1001.0) -> list[Effect]:
    return group.handle(BecameReady(identity, group.processes[identity].incarnation), now)


def die(group: Group, identity: Identity, now: float) -> list[Effect]:
    return group.handle(Exited(identity, group.processes[identity].incarnation, -9), now)


def running(max_restarts: int = 3) -> Group:
    group = started(max_restarts)
    ready(group, FRONTEND)
    ready(group, WORKER)
    return group
