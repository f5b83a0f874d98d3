"""Pages between meshes: a server's leased and pushed pages, what its readers get, and connections that lie or break off."""

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from meshlm.protocol.edges.kv import KEY_BYTES, NAMESPACE_BYTES
from meshlm.protocol.remote_pages import TICKET_BYTES, VERSION, Find, Put, Read
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.kv.connectors import Page
from meshlm.workers.kv.remote import connector as connector_module
from meshlm.workers.kv.remote.connector import RemoteConnector
from meshlm.workers.kv.remote.frames import Broken, receive_reply, send, send_page
from meshlm.workers.kv.remote.server import PageServer
from meshlm.workers.kv.remote.slices import PageShape
from meshlm.workers.kv.remote.tickets import Held

PAGE = 1000
WHOLE = PageShape(PAGE)
NAMESPACE = b"n" * NAMESPACE_BYTES
TICKET = b"t" * TICKET_BYTES
SOON = 20.0


class Mesh:
    """One worker with a cache of ten pages."""

    def __init__(self, buffer_bytes: int = 4 * PAGE, shape: PageShape = WHOLE) -> None:
        self.shape = shape
        self.cache = np.random.default_rng(len(MESHES)).integers(0, 256, (10, shape.page_bytes), np.uint8)
        self.taken: list[tuple[int, int]] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.server = PageServer(listener, shape, self.read, lambda *told: self.taken.append(told), buffer_bytes)
        self.server.namespace = NAMESPACE
        self.session = 3
        self.connector = RemoteConnector(self.server)
        MESHES.append(self)

    def read(self, session: int, pages: Sequence[int], deadline_ns: int) -> Sequence[Page]:
        return list(self.cache[list(pages)]) if session == self.session else []

    def leave(self, places: dict[bytes, list[int]], ends_in: float = SOON) -> dict[str, Any]:
        """The params of a request whose pages lie here."""
        held: dict[bytes, list[int | Page]] = {key: list(pages) for key, pages in places.items()}
        self.server.tickets.leave(TICKET, Held(held, time.monotonic_ns() + int(ends_in * 1e9), 3, 7))
        host, port = self.server.address
        return {"ticket": TICKET.hex(), "remote_host": host, "remote_port": port}


MESHES: list[Mesh] = []


@pytest.fixture(autouse=True)
def meshes() -> Iterator[None]:
    yield
    for mesh in MESHES:
        mesh.connector.close()
        mesh.server.close()
    MESHES.clear()


def key(number: int) -> bytes:
    return bytes([number]) * KEY_BYTES


def empty(count: int) -> list[Page]:
    return [np.zeros(PAGE, np.uint8) for _ in range(count)]


def test_leased_pages_are_read_by_their_ticket() -> None:
    p, d = Mesh(), Mesh()
    params = p.leave({key(1): [3], key(2): [5, 6]})
    assert list(d.connector.find([key(1), key(9), key(2)], params)) == [True, False, True]
    pages = empty(4)
    assert list(d.connector.load([key(1), key(2), key(2), key(9)], pages, params)) == [True, True, True, False]
    for page, number in zip(pages, (3, 5, 6), strict=False):
        assert (page == p.cache[number]).all()
    assert not p.taken
    d.connector.end(params)
    assert p.taken == [(3, 7)]
    assert list(d.connector.find([key(1)], params | {})) == [False]  # it was done with


def test_a_lease_that_ended_has_nothing() -> None:
    p, d = Mesh(), Mesh()
    params = p.leave({key(1): [3]}, ends_in=-1.0)
    assert list(d.connector.load([key(1)], empty(1), params)) == [False]


def test_a_reset_leaves_nothing_of_the_cache() -> None:
    p, d = Mesh(), Mesh()
    params = p.leave({key(1): [3]})
    p.server.tickets.reset()
    assert list(d.connector.load([key(1)], empty(1), params)) == [False]


def test_a_session_that_ends_while_pages_are_read_ends_the_connection() -> None:
    p, d = Mesh(), Mesh()
    params = p.leave({key(1): [3]})
    p.session = 4
    with pytest.raises(Broken):
        d.connector.load([key(1)], empty(1), params)


def test_pages_of_another_namespace_are_refused_by_name() -> None:
    p, d = Mesh(), Mesh()
    d.server.namespace = b"m" * NAMESPACE_BYTES
    with pytest.raises(Broken, match="another model"):
        d.connector.find([key(1)], p.leave({key(1): [3]}))


def test_pushed_pages_are_found_here() -> None:
    p, d = Mesh(), Mesh()
    host, port = d.server.address
    params = {
        "ticket": TICKET.hex(),
        "push_host": host,
        "push_port": port,
        "remote_host": "192.0.2.1",
        "remote_port": 1,
    }
    p.connector.push([key(1), key(2)], [p.cache[1], p.cache[2]], params)
    assert list(d.connector.find([key(2), key(3)], params)) == [True, False]
    (page,) = pages = empty(1)
    assert list(d.connector.load([key(2)], pages, params)) == [True]
    assert (page == p.cache[2]).all()


def test_the_buffer_keeps_the_newest_and_is_bounded() -> None:
    p, d = Mesh(), Mesh(buffer_bytes=2 * PAGE)
    host, port = d.server.address
    for number in range(3):
        ticket = bytes([number]) * TICKET_BYTES
        params = {"ticket": ticket.hex(), "push_host": host, "push_port": port}
        p.connector.push([key(number)], [p.cache[number]], params)
    held = [d.server.tickets.find(bytes([number]) * TICKET_BYTES) is not None for number in range(3)]
    assert held == [False, True, True]
    with pytest.raises(Broken, match="kv_buffer_size"):
        p.connector.push([key(1)] * 3, list(p.cache[:3]), {**params, "ticket": TICKET.hex()})


def test_pages_that_are_being_sent_are_bounded_together() -> None:
    d = Mesh(buffer_bytes=2 * PAGE)
    with socket.create_connection(d.server.address) as slow, socket.create_connection(d.server.address) as other:
        send(slow, Put(VERSION, NAMESPACE, TICKET, key(1) + key(2), 1, 0))
        assert not receive_reply(slow).error
        send(other, Put(VERSION, NAMESPACE, b"u" * TICKET_BYTES, key(3), 1, 0))
        assert "kv_buffer_size" in receive_reply(other).error
        for page in d.cache[:2]:
            send_page(slow, page)
        receive_reply(slow)
    assert d.server.tickets.find(TICKET) is not None


def test_a_page_with_a_wrong_sum_is_not_there() -> None:
    d = Mesh()
    with socket.create_connection(d.server.address) as connection:
        send(connection, Put(VERSION, NAMESPACE, TICKET, key(1) + key(2), 1, 0))
        receive_reply(connection)
        connection.sendall(b"x" * PAGE + b"\0\0\0\0")
        send_page(connection, d.cache[2])
        receive_reply(connection)
    held = d.server.tickets.find(TICKET)
    assert held is not None
    assert list(held.places) == [key(2)]


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff", b"\0\0\0\3abc", b"\0\0\0\1\x93", b"GET / HTTP/1.1\r\n\r\n"])
def test_strangers_end_their_own_connection_alone(said: bytes) -> None:
    p, d = Mesh(), Mesh()
    params = p.leave({key(1): [3]})
    with socket.create_connection(p.server.address) as connection:
        connection.settimeout(SOON)
        connection.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert list(d.connector.find([key(1)], params)) == [True]


def test_whoever_knows_no_ticket_reads_nothing() -> None:
    p = Mesh()
    p.leave({key(1): [3]})
    with socket.create_connection(p.server.address) as connection:
        for ask in (
            Find(VERSION, NAMESPACE, b"u" * TICKET_BYTES, key(1), 0.0),
            Read(b"u" * TICKET_BYTES, key(1), 1, 0),
        ):
            send(connection, ask)
            assert not any(receive_reply(connection).found)


def test_a_mesh_that_is_gone_is_an_error_and_another_is_found() -> None:
    p, d = Mesh(), Mesh()
    params = p.leave({key(1): [3]})
    with pytest.raises(OSError, match="refused"):
        d.connector.find([key(1)], {**params, "remote_port": _closed_port("127.0.0.1")})
    assert list(d.connector.find([key(1)], params)) == [True]


def _closed_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("params", [{"ticket": "zz"}, {"ticket": "00"}])
def test_a_ticket_that_is_none_is_named(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Mesh().connector.find([key(1)], params)


def test_a_worker_that_the_other_rank_has_not() -> None:
    p, d = Mesh(), Mesh(shape=PageShape(PAGE, 0, 0, Shard(0, 1, 1, 2)))
    params = p.leave({key(1): [3]})
    with pytest.raises(Broken, match="-pp is 1 there and 2 here"):
        d.connector.find([key(1)], params)
    p = Mesh(shape=PageShape(PAGE, 0, 0, Shard(0, 1, 0, 2)))
    params = p.leave({key(1): [3]})
    with pytest.raises(ValueError, match="remote_ports"):
        d.connector.find([key(1)], {**params, "remote_ports": [params["remote_port"]]})


def test_another_tp_is_refused_by_name_where_pages_are_not_cut() -> None:
    p, d = Mesh(), Mesh(shape=PageShape(PAGE // 2, 0, 0, Shard(1, 2)))
    with pytest.raises(Broken, match="-tp is 1 there and 2 here, and pages of this model"):
        d.connector.find([key(1)], p.leave({key(1): [3]}))


HEADS, HEAD_BYTES, ROWS = 4, 6, 10


def group(tp_size: int, heads: int = HEADS, **options: int) -> list[Mesh]:
    """The workers of a mesh, whose pages hold together what those of one worker would: each its heads."""
    whole = np.random.default_rng(tp_size).integers(0, 256, (10, ROWS, heads, HEAD_BYTES), np.uint8)
    found = list[Mesh]()
    for rank in range(tp_size):
        own = range(*Shard(rank, tp_size).kv_heads(heads))
        mesh = Mesh(shape=PageShape(ROWS * len(own) * HEAD_BYTES, heads, HEAD_BYTES, Shard(rank, tp_size)), **options)
        mesh.cache = whole[:, :, own.start : own.stop].reshape(10, -1).copy()
        found.append(mesh)
    return found


def whole_of(pages: list[Page], heads: int = HEADS) -> Page:
    """What pages of all workers hold together, as pages of one would; what several have is equal."""
    found = np.zeros((ROWS, heads, HEAD_BYTES), np.uint8)
    for rank, page in enumerate(pages):
        own = range(*Shard(rank, len(pages)).kv_heads(heads))
        rows = page.reshape(ROWS, -1, HEAD_BYTES)
        found[:, own.start : own.stop] = rows
        assert (found[:, own.start : own.stop] == rows).all()
    return found


SIZES = [(1, 2), (2, 1), (4, 1), (1, 4), (2, 4), (4, 2), (2, 2)]


@pytest.mark.parametrize("heads", [HEADS, 2, 1])
@pytest.mark.parametrize(("theirs", "ours"), SIZES)
def test_pages_are_read_across_another_tp(theirs: int, ours: int, heads: int) -> None:
    """Whatever heads each side has; the lease ends with the last that read."""
    there, here = group(theirs, heads), group(ours, heads)
    params, *_ = [mesh.leave({key(1): [3], key(2): [5, 6]}) for mesh in there]
    params["remote_ports"] = [mesh.server.address[1] for mesh in there]
    keys, loaded = [key(1), key(2), key(2), key(9)], list[list[Page]]()
    for nth, mesh in enumerate(here):
        assert list(mesh.connector.find([key(1), key(9), key(2)], params)) == [True, False, True]
        pages = [np.zeros(mesh.shape.page_bytes, np.uint8) for _ in keys]
        assert list(mesh.connector.load(keys, pages, params)) == [True, True, True, False]
        mesh.connector.end(params)
        loaded.append(pages)
        is_over = nth == ours - 1
        assert is_over or not all(one.taken for one in there)
    for nth, number in enumerate((3, 5, 6)):
        wanted = whole_of([mesh.cache[number] for mesh in there], heads)
        assert (whole_of([pages[nth] for pages in loaded], heads) == wanted).all()
    readers = {holder for mesh in here for holder in mesh.shape.taken_from(theirs)}
    assert [one.taken for one in there] == [[(3, 7)] if nth in readers else [] for nth in range(theirs)]


@pytest.mark.parametrize(("theirs", "ours"), SIZES)
def test_pages_are_sent_across_another_tp(theirs: int, ours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there once all that have heads of them have sent."""
    there, here = group(theirs), group(ours)
    ports = [mesh.server.address[1] for mesh in here]
    real = connector_module._address
    monkeypatch.setattr(
        connector_module,
        "_address",
        lambda params, worker: ("127.0.0.1", ports[worker]) if "remote_port" in params else real(params, worker),
    )
    params = {"ticket": TICKET.hex(), "push_host": "127.0.0.1", "push_port": ports[0]}
    for nth, mesh in enumerate(there):
        held = [one.server.tickets.find(TICKET) for one in here]
        assert not all(held), f"{nth} of {theirs} have sent"
        mesh.connector.push([key(1), key(2)], [mesh.cache[1], mesh.cache[2]], params)
    found = list[Page]()
    for mesh in here:
        page = np.zeros(mesh.shape.page_bytes, np.uint8)
        assert list(mesh.connector.load([key(2)], [page], params)) == [True]
        found.append(page)
        assert len(mesh.server.tickets._held) == 1
    assert (whole_of(found) == whole_of([mesh.cache[2] for mesh in there])).all()


def test_what_one_of_two_has_not_sent_is_not_there_and_makes_room() -> None:
    (d,), (p, _) = group(1, buffer_bytes=2 * ROWS * HEADS * HEAD_BYTES), group(2)
    host, port = d.server.address
    for number in range(6):
        params = {"ticket": (bytes([number]) * TICKET_BYTES).hex(), "push_host": host, "push_port": port}
        p.connector.push([key(number)], [p.cache[number]], params)
        assert d.server.tickets.find(bytes([number]) * TICKET_BYTES) is None
    assert len(d.server.tickets._held) == 2


@pytest.mark.parametrize("place", [(0, 0), (-1, 0), (2, 2), (2, -1), (1 << 40, 0)])
def test_ranks_that_are_not_there_end_their_own_connection(place: tuple[int, int]) -> None:
    p = group(2)[0]
    params = p.leave({key(1): [3]})
    with socket.create_connection(p.server.address) as connection:
        send(connection, Read(TICKET, key(1), *place))
        with pytest.raises(Broken):
            receive_reply(connection)
    with socket.create_connection(p.server.address) as connection:
        send(connection, Put(VERSION, NAMESPACE, TICKET, key(1), *place))
        assert "no heads of this worker" in receive_reply(connection).error
    assert list(Mesh(shape=p.shape).connector.find([key(1)], params)) == [True]
