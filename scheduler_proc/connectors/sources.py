"""Who may have the KV of a request, the question to them, and their answers. Pure; used by loads.py."""

from collections.abc import Sequence
from typing import NamedTuple

from meshlm.protocol.edges.kv import NOT_HERE, FindPages, PagesFound
from meshlm.protocol.wire.columns import ints
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.scheduler_proc.connectors.load import Source
from meshlm.scheduler_proc.connectors.session import STORE, PageSession
from meshlm.scheduler_proc.kv.lease import Key
from meshlm.scheduler_proc.request import Request


class Connectors(NamedTuple):
    """Connectors of the workers: those that may have any request's KV, and those that requests name (KVTransfer)."""

    of_all: Sequence[str] = ()
    by_request: Sequence[str] = ()


def sources_of(session: PageSession, request: Request, connectors: Connectors) -> tuple[list[Source], bool]:
    """Those that are asked for a request's KV, in the order in which they are preferred; and whether one of them has computed it for
    this request."""
    params = next((extra.kv_params for extra in request.work.extras if extra.brings_kv), b"")
    holder = request.holder if request.holder in session.peers else None
    found = [] if holder is None else [Source("rank", next(session.numbers), {holder}, holder)]
    if session.store:
        found.append(Source("store", next(session.numbers), {STORE}, STORE))
    names = (*(connectors.by_request if params else ()), *connectors.of_all)
    found += [Source(name, next(session.numbers), set(session.workers), params=params) for name in names]
    return found, holder is not None or bool(params)


def ask(session: PageSession, source: Source, keys: Sequence[Key]) -> None:
    """Sends the question."""
    columns = b"".join(key.key for key in keys), bytes(key.width for key in keys)
    block_s = session.batching.budget.prompt_s * session.kv.block_size / session.kv.prefixes.num_kinds
    for to in source.missing:
        if source.holder is not None:
            session.send(to, FindPages(source.number, session.namespace, *columns, block_s))
        else:
            number, namespace = source.number, session.namespace
            session.send(
                to, FindPages(number, namespace, *columns, block_s, session.number, source.kind, source.params)
            )


def take_answer(
    session: PageSession, source: Source, sender: Identity, answer: PagesFound, keys: Sequence[Key]
) -> None:
    """Notes what this one has. Of several workers all must have a key."""
    source.missing.discard(sender)
    pages, at = ints(answer.pages), 0
    source.is_leased = bool(pages) and source.holder is not None
    source.memory = answer.memory or (session.store if sender.role is Role.STORE else ())
    can_read = source.holder is None or len(source.memory) == len(session.workers)
    if not can_read or len(pages) != sum(key.width for key in keys):
        pages = [NOT_HERE] * sum(key.width for key in keys)
    has: dict[bytes, Sequence[int]] = {}
    for key in keys:
        some = pages[at : at + key.width]
        at += key.width
        if NOT_HERE not in some:
            has[key.key] = some
    source.has = has if source.has is None else {key: some for key, some in source.has.items() if key in has}
