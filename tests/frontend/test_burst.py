"""Bursts: each client reads its events, whole and in order, whatever its socket takes at a time."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from meshlm.frontend.burst import Burst, Direct, Form

TEXTS = st.lists(
    st.lists(st.sampled_from(["", "a", '"\n\\', "é€😀", "\x00\u2028", "x" * 3000]), min_size=3, max_size=3), max_size=8
)
ROOM = st.lists(st.integers(0, 400), max_size=40)


class Client:
    """A line whose socket takes so many bytes at each call, and then everything; it holds back what was not taken."""

    def __init__(self, room: list[int]) -> None:
        self.room, self.read, self.held = room, b"", b""
        self.lent: list[tuple[list[Direct | None], int]] = []
        self.num_direct = 0

    def direct(self, data: bytes) -> int:
        assert not self.held, "something was overtaken"
        self.num_direct += 1
        room = self.room.pop() if self.room else len(data)
        if not room:
            raise BlockingIOError
        self.read += data[:room]
        return min(room, len(data))

    def write(self, event: bytes) -> None:
        """The transport may take it all: then what is lent stays so."""
        self._hold(b"%x\r\n%b\r\n" % (len(event), event))
        if self.held:
            self._take_back()

    def lend(self, slots: list[Direct | None], place: int) -> None:
        assert (slots, place) not in self.lent
        if not self.held:
            slots[place] = self.direct
            self.lent.append((slots, place))

    def rest(self, data: bytes) -> None:
        self._take_back()
        self._hold(data)

    def _take_back(self) -> None:
        for slots, place in self.lent:
            slots[place] = None
        self.lent.clear()

    def _hold(self, data: bytes) -> None:
        self.held += data
        if not self.room or self.room.pop() % 2:
            self.flush()

    def flush(self) -> None:
        self.read += self.held
        self.held = b""


@given(TEXTS, ROOM)
def test_every_client_reads_its_events_in_order(rounds: list[list[str]], room: list[int]) -> None:
    """The third stream is of the second one's client."""
    clients = [Client(room[::2]), Client(room[1::2])]
    forms = [Form(b"1<", b">", clients[0]), Form(b"2<", b">", clients[1]), Form(b"3<", b">!", clients[1])]
    burst, expected = Burst(forms), [b"", b""]
    for texts in rounds:
        burst.send(texts)
        for place, (text, form) in enumerate(zip(texts, forms, strict=True)):
            if text:
                event = form.prefix + msgspec.json.encode(text) + form.suffix
                expected[min(place, 1)] += b"%x\r\n%b\r\n" % (len(event), event)
    for client, events in zip(clients, expected, strict=True):
        client.flush()
        assert client.read == events


def test_a_client_with_room_is_served_directly() -> None:
    client = Client([])
    burst = Burst([Form(b"<", b">", client)])
    for text in ("a", "", "b", "c"):
        burst.send([text])
    assert client.read == b'5\r\n<"a">\r\n5\r\n<"b">\r\n5\r\n<"c">\r\n'
    assert client.num_direct == 2
