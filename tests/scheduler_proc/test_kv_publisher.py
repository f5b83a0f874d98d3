"""The events' sockets: numbers, replays, and subscribers that are late, slow or foreign."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from waiting import free_port

from meshlm.protocol import kv_events
from meshlm.protocol.config import KVEventsConfig
from meshlm.protocol.kv_events import AllBlocksCleared, BlockRemoved
from meshlm.runtime.errors import ProcessFatal
from meshlm.scheduler_proc import kv_publisher
from meshlm.scheduler_proc.kv_publisher import KVPublisher, Place, local_sockets

LIMIT_MS = 20_000
END = (kv_events.END_OF_REPLAY, b"")


Make = Callable[[int], Any]


@pytest.fixture
def socket_of() -> Iterator[Make]:
    """Makes sockets of a kind."""
    context, made = zmq.asyncio.Context(), []

    def make(kind: int) -> Any:
        made.append(context.socket(kind))
        return made[-1]

    yield make
    for socket in made:
        socket.close(0)
    context.term()


def number_of(frame: bytes) -> int:
    assert len(frame) == 8
    return int.from_bytes(frame, "big")


async def received(socket: Any) -> list[bytes]:
    assert await socket.poll(LIMIT_MS), "nothing came"
    frames: list[bytes] = await socket.recv_multipart()
    return frames


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(body(), LIMIT_MS / 1e3)

    asyncio.run(limited())


def config(**settings: Any) -> KVEventsConfig:
    return KVEventsConfig(**{"enabled": True, "endpoint": f"tcp://127.0.0.1:{free_port()}", **settings})


def bound(**settings: Any) -> tuple[KVEventsConfig, str, str]:
    """Settings, and where subscribers find the batches and replays of rank 0."""
    port, replay = free_port(), free_port()
    found = config(endpoint=f"tcp://*:{port}", replay_endpoint=f"tcp://*:{replay}", **settings)
    return found, f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay}"


async def replayed(socket: Any, start: int) -> list[tuple[int, bytes]]:
    await socket.send_multipart((b"", start.to_bytes(8, "big")))
    found: list[tuple[int, bytes]] = []
    while True:
        empty, number, payload = await received(socket)
        assert empty == b""
        if (number, payload) == END:
            return found
        found.append((number_of(number), payload))


def test_who_comes_within_a_moment_misses_nothing(socket_of: Make) -> None:
    """A new scheduler's first words wait for the subscribers of the one before, whose sockets connect again."""
    settings, pub, _ = bound(topic="kv@a")

    async def body() -> None:
        publisher = KVPublisher(settings, Place(3), lambda: 5.5)
        publisher.publish([AllBlocksCleared()])
        publisher.publish([BlockRemoved([1], "GPU")])
        other, late = socket_of(zmq.SUB), socket_of(zmq.SUB)
        for socket, topic in ((other, b"kv@b"), (late, b"kv@")):
            socket.connect(kv_events.address_of_rank(pub, 3))
            socket.subscribe(topic)
        for number, events in enumerate([[AllBlocksCleared()], [BlockRemoved([1], "GPU")]]):
            topic, name, payload = await received(late)
            assert (topic, number_of(name)) == (b"kv@a", number)
            batch = kv_events.decode(payload)
            assert (batch.ts, batch.events, batch.data_parallel_rank) == (5.5, events, 3)
        publisher.publish([AllBlocksCleared()])
        assert number_of((await received(late))[1]) == 2, "and later ones at once"
        assert not await other.poll(0), "of another topic"
        publisher.close()

    run(body)


def test_a_replay_has_what_is_kept_and_an_end(socket_of: Make) -> None:
    settings, _, replay = bound(buffer_steps=200)

    async def body() -> None:
        publisher = KVPublisher(settings, Place(0), lambda: 1.0)
        socket = socket_of(zmq.DEALER)
        socket.connect(replay)
        assert await replayed(socket, 0) == []
        for number in range(300):
            publisher.publish([BlockRemoved([number], "GPU")])
        found = await replayed(socket, 0)
        assert [number for number, _ in found] == [*range(100, 300)], "the oldest are gone"
        assert all(kv_events.decode(payload).events[0] == BlockRemoved([n], "GPU") for n, payload in found)
        assert [number for number, _ in await replayed(socket, 297)] == [297, 298, 299]
        assert await replayed(socket, 300) == await replayed(socket, 1 << 60) == []
        await socket.send_multipart((b"", b"too long a number"))
        await socket.send_multipart((b"what is", b"this"))
        endless = socket_of(zmq.DEALER)
        endless.connect(replay)
        for _ in range(200):
            await endless.send_multipart((b"", b"x" * 100_000))  # whose connection ends
        plain = socket_of(zmq.REQ)  # as vLLM's example asks: it gets the first answer of many
        plain.connect(replay)
        await plain.send((299).to_bytes(8, "big"))
        assert number_of((await received(plain))[0]) == 299
        assert [number for number, _ in await replayed(socket, 299)] == [299], "whatever others sent"
        publisher.close()

    run(body)


def test_several_replays_at_once(socket_of: Make) -> None:
    settings, _, replay = bound()

    async def body() -> None:
        publisher = KVPublisher(settings, Place(0), lambda: 1.0)
        for number in range(500):
            publisher.publish([BlockRemoved([number], "GPU")])
        sockets = [socket_of(zmq.DEALER) for _ in range(5)]
        for socket in sockets:
            socket.connect(replay)
        found = await asyncio.gather(*(replayed(socket, 10 * at) for at, socket in enumerate(sockets)))
        assert [[number for number, _ in one] for one in found] == [[*range(10 * at, 500)] for at in range(5)]
        publisher.close()

    run(body)


def test_a_client_that_reads_no_replay_holds_no_other_up(socket_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "REPLAY_HWM", 200)
    settings, _, replay = bound()

    async def body() -> None:
        publisher = KVPublisher(settings, Place(0), lambda: 1.0)
        for _ in range(1500):
            publisher.publish([BlockRemoved([1 << 63] * 1000, "GPU")])  # 13 MB
        slow, quick = socket_of(zmq.DEALER), socket_of(zmq.DEALER)
        slow.setsockopt(zmq.RCVHWM, 1)
        slow.setsockopt(zmq.RCVBUF, 4096)
        for socket in (slow, quick):
            socket.connect(replay)
        await slow.send_multipart((b"", bytes(8)))
        assert number_of((await received(slow))[1]) == 0
        assert [number for number, _ in await replayed(quick, 0)] == [*range(1500)]
        rest = [number_of((await received(slow))[1]) for _ in range(1499)]
        assert rest == [*range(1, 1500)], "it gets all once it reads"
        assert (await received(slow))[1:] == list(END)
        publisher.close()

    run(body)


def test_bytes_of_replays_are_bounded(socket_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "MAX_KEPT_BYTES", 3000)
    settings, _, replay = bound()

    async def body() -> None:
        publisher = KVPublisher(settings, Place(0), lambda: 1.0)
        for _ in range(50):
            publisher.publish([BlockRemoved([1 << 63] * 50, "GPU")])  # about 500 bytes
        socket = socket_of(zmq.DEALER)
        socket.connect(replay)
        found = await replayed(socket, 0)
        assert sum(len(payload) for _, payload in found) <= 3000
        assert [number for number, _ in found] == [*range(50 - len(found), 50)]
        assert len(found) > 3
        publisher.close()

    run(body)


def test_nobody_who_does_not_read_holds_a_step_up(socket_of: Make) -> None:
    """A subscriber that reads nothing misses batches, and the numbers say so."""
    settings, pub, _ = bound(hwm=10)

    async def body() -> None:
        publisher = KVPublisher(settings, Place(0), lambda: 1.0)
        slow = socket_of(zmq.SUB)
        slow.setsockopt(zmq.RCVHWM, 1)
        slow.setsockopt(zmq.RCVBUF, 4096)
        slow.connect(pub)
        slow.subscribe(b"")
        publisher.publish([AllBlocksCleared()])
        assert number_of((await received(slow))[1]) == 0
        for _ in range(3000):
            publisher.publish([BlockRemoved([1 << 63] * 1000, "GPU")])  # 27 MB
        numbers = [number_of((await received(slow))[1]) for _ in range(3)]
        while await slow.poll(300):
            numbers.append(number_of((await slow.recv_multipart())[1]))
        assert numbers == sorted(numbers)
        assert len(numbers) < 3000
        publisher.close()

    run(body)


def test_a_publisher_goes_to_a_subscriber_that_listens(socket_of: Make) -> None:
    """One router that binds hears many engines, as llm-d has it."""
    port = free_port()
    router = socket_of(zmq.SUB)
    router.bind(f"tcp://127.0.0.1:{port}")
    router.subscribe(b"")

    async def body() -> None:
        publisher = KVPublisher(config(endpoint=f"tcp://127.0.0.1:{port}"), Place(0), lambda: 1.0)
        publisher.publish([AllBlocksCleared()])
        assert number_of((await received(router))[1]) == 0
        publisher.close()

    run(body)


def test_an_address_that_is_taken_ends_the_process(socket_of: Make) -> None:
    port = free_port()
    socket_of(zmq.PUB).bind(f"tcp://*:{port}")

    async def body() -> None:
        with pytest.raises(ProcessFatal, match=f"--kv-events-config: tcp://\\*:{port}: Address already in use"):
            KVPublisher(config(endpoint=f"tcp://*:{port}"), Place(0), lambda: 1.0)

    run(body)


def test_frontends_hear_it_in_the_run_directory(socket_of: Make, tmp_path: Path) -> None:
    async def body() -> None:
        for incarnation in (4, 5):
            local = local_sockets(tmp_path, 0, incarnation)
            other = local_sockets(tmp_path, 1, 1)
            publisher = KVPublisher(config(), Place(0, local), lambda: 1.0)
            assert set(os.listdir(tmp_path)) == {
                f"kv-events-0-{incarnation}.sock",
                f"kv-events-0-{incarnation}-replay.sock",
            }, "those of earlier schedulers are gone"
            publisher.publish([AllBlocksCleared()])
            sub, dealer = socket_of(zmq.SUB), socket_of(zmq.DEALER)
            sub.connect(local.pub)
            sub.subscribe(b"")
            dealer.connect(local.replay)
            assert [number for number, _ in await replayed(dealer, 0)] == [0]
            assert number_of((await received(sub))[1]) == 0
            assert other.pub.endswith("kv-events-1-1.sock")
            publisher.close()

    run(body)
