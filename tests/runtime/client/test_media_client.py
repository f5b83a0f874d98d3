"""Questions to the media process, and what their answers hold: until it is let go, through deaths and lost messages."""

import asyncio

import pytest
from msgspec import Struct

from meshlm.protocol.edges.media import Hold, HoldMedia, MediaRead, MediaSource, ReadMedia, ReleaseMedia
from meshlm.protocol.media import MediaItem, Modality
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity
from meshlm.runtime.client import media_client
from meshlm.runtime.client.media_client import MEDIA, Held, MediaClient
from meshlm.runtime.errors import LinkDown, RequestError
from meshlm.runtime.mesh import media_holds
from meshlm.runtime.mesh.media_holds import hold_messages

SOURCE = MediaSource(Modality.IMAGE, "messages[0]", "messages", b"data")


def item(digest: bytes) -> MediaItem:
    return MediaItem(Modality.IMAGE, digest, b"", b"")


class Peer:
    """A media process, in the place of the mesh."""

    def __init__(self) -> None:
        self.client, self.told, self.is_there = MediaClient(), list[Struct](), True
        self.client.send = self.send
        self.news = asyncio.Event()

    def send(self, to: Identity, message: Struct) -> None:
        assert to == MEDIA
        if not self.is_there:
            raise LinkDown(to)
        self.told.append(message)
        self.news.set()

    async def hears(self, message: Struct) -> None:
        """It is told this, in time."""
        async with asyncio.timeout(10):
            while message not in self.told:
                self.news.clear()
                await self.news.wait()

    async def asks(self) -> "asyncio.Task[Held]":
        task = asyncio.create_task(self.client.read([SOURCE]))
        await asyncio.sleep(0)
        return task

    async def reads(self, handle: int, *digests: bytes) -> Held:
        task = await self.asks()
        self.client.answered(MediaRead(Handle(handle), tuple(map(item, digests))))
        return await task


async def test_what_is_read_is_held_until_its_last_user_lets_it_go() -> None:
    peer = Peer()
    held = await peer.reads(1, b"a")
    held.num_users = 2
    held.release()
    assert peer.told == [ReadMedia(Handle(1), (SOURCE,))]
    held.release()
    assert peer.told[1:] == [ReleaseMedia(Handle(1))]


async def test_a_new_media_process_is_told_what_is_held_before_it_is_asked() -> None:
    peer = Peer()
    await peer.reads(1, b"a", b"b")
    question = await peer.asks()
    peer.client.down()
    peer.told.clear()
    peer.client.up()
    holds = Hold(Handle(1), (b"a", b"b")), Hold(Handle(2))
    assert peer.told == [HoldMedia(holds, 0, 2), ReadMedia(Handle(2), (SOURCE,))]
    peer.client.answered(MediaRead(Handle(2), (item(b"c"),)))
    assert (await question).items == (item(b"c"),)


async def test_what_is_held_is_said_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_client, "RENEW_S", 0.01)
    peer = Peer()
    held = await peer.reads(1, b"a")
    await peer.hears(HoldMedia((Hold(Handle(1), (b"a",)),), 0, 1))
    peer.is_there = False
    held.release()  # is lost
    peer.is_there = True
    await peer.hears(HoldMedia((), 0, 1))
    assert peer.client.is_idle, "nothing is held, and nothing more is said"


async def test_a_client_that_left_keeps_its_files_for_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_client, "LEASE_S", 0.02)
    peer = Peer()
    (await peer.reads(1, b"a")).leave()
    assert len(peer.told) == 1
    await peer.hears(ReleaseMedia(Handle(1)))


async def test_who_leaves_when_the_answer_has_just_come_holds_nothing() -> None:
    peer = Peer()
    task = await peer.asks()
    peer.client.answered(MediaRead(Handle(1), (item(b"a"),)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert peer.told[1:] == [ReleaseMedia(Handle(1))]


async def test_a_refusal_holds_nothing() -> None:
    peer = Peer()
    task = await peer.asks()
    peer.client.answered(MediaRead(Handle(1), (), ErrorKind.INVALID, "no", "messages"))
    with pytest.raises(RequestError, match="no"):
        await task
    assert len(peer.told) == 1


def test_many_holds_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_holds, "DIGESTS_AT_ONCE", 4)
    holds = [Hold(Handle(number), (b"a", b"b")) for number in (1, 3, 7, 9)]
    found = list(hold_messages(reversed(holds), 12, [b"%d" % number for number in range(9)]))
    assert [one for message in found for one in message.holds] == holds
    ranges = [(message.after, message.through) for message in found if message.through]
    assert [after for after, _ in ranges] == [0, *(through for _, through in ranges[:-1])]
    assert ranges[-1][1] == 12
    assert [other for message in found for other in message.others] == [b"%d" % number for number in range(9)]
    assert max(len(message.holds) for message in found) == 1
