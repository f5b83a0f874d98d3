"""Streams of one scheduler among which nothing happens but the next token: taken in as columns, whatever their number. Pure.

Made by core.py when two frames in a row have the same rows and nothing else; scheduler_proc/steady.py says why columns. While it
stands, the journal's entries lag behind, and `settle` brings them up to date: before anything else looks at them (any event but
the next such frame), and with every Tick. What needs more than a look-up in the table of texts is done for
its stream alone: characters that are not whole yet, stop strings.
"""

from array import array
from collections.abc import Iterator

from meshlm.detokenizer.batch import FrontendBatch
from meshlm.detokenizer.stream import Stream
from meshlm.protocol.columns import Counters, pack_i32, unpack_i32
from meshlm.protocol.ids import Identity
from meshlm.protocol.token_edge import TokenDeltas

FEWEST = 16  # with fewer streams the loop is as fast


class Part:
    """One frontend's streams, in the order of the frame."""

    __slots__ = ("frontend", "handles", "next_index", "places")

    def __init__(self, frontend: Identity, places: list[int], streams: list[Stream]) -> None:
        self.frontend, self.places = frontend, places
        self.handles = pack_i32(streams[place].frontend_handle for place in places)
        self.next_index = Counters(len(streams[place].emitted) for place in places)


class Steady:
    """Make it with `of`."""

    def __init__(self, handles: bytes, streams: list[Stream], texts: list[str | None]) -> None:
        self.streams, self._handles, self._texts = streams, handles, texts
        self._starts = Counters(len(stream.emitted) for stream in streams)
        self._partial = {place for place, stream in enumerate(streams) if stream.partial}
        self._stops = [(place, stream) for place, stream in enumerate(streams) if stream.stop is not None]
        self._token_ids: list[bytes] = []  # columns of the frames, in order
        places: dict[Identity, list[int]] = {}
        for place, stream in enumerate(streams):
            places.setdefault(stream.frontend, []).append(place)
        self.parts = [Part(frontend, mine, streams) for frontend, mine in places.items()]

    @classmethod
    def of(cls, handles: bytes, found: "list[Stream | None]") -> "Steady | None":
        """None when one of them is unknown, has a cut ahead, or decodes with another table."""
        streams = [stream for stream in found if stream is not None and len(stream.emitted) >= stream.cut]
        texts = streams[0].texts if streams else None
        if texts is None or len(streams) < len(found) or any(stream.texts is not texts for stream in streams):
            return None
        return cls(handles, streams, texts)

    def is_next(self, deltas: TokenDeltas) -> bool:
        """Whether this frame brings one more token of each stream."""
        return deltas.handles == self._handles and deltas.starts == self._starts.column()

    def take(self, token_ids: bytes, batches: dict[Identity, FrontendBatch]) -> list[tuple[Stream, int]] | None:
        """The tokens of that frame; the streams that found a stop string, with their rows in their batches.

        None, and nothing is changed, for tokens that are in no vocabulary.
        """
        texts = self._read(unpack_i32(token_ids))
        if texts is None:
            return None
        self._token_ids.append(token_ids)
        self._starts.advance()
        for place, stream in self._stops:
            texts[place] = self._shown(stream, texts[place])
        ended = {place: stream for place, stream in self._stops if stream.stop and stream.stop.matched is not None}
        rows: list[tuple[Stream, int]] = []
        whole = len(self.parts) == 1
        for part in self.parts:
            mine, ids = texts, token_ids
            if not whole:
                mine = [texts[place] for place in part.places]
                tokens = unpack_i32(token_ids)
                ids = pack_i32([tokens[place] for place in part.places])
            batch = batches.get(part.frontend)
            if batch is None:
                batch = batches[part.frontend] = FrontendBatch()
            first = batch.columns(part, part.handles, part.next_index.column(), ids, mine)
            part.next_index.advance()
            if ended:
                rows += [(ended[place], first + nth) for nth, place in enumerate(part.places) if place in ended]
        return rows

    def _read(self, tokens: "memoryview[int]") -> list[str] | None:
        """Their texts, before the search for stop strings."""
        table = self._texts
        try:
            texts = [table[token] for token in tokens]
        except IndexError:
            return None
        if self._partial or None in texts:
            for place in self._partial | {place for place, text in enumerate(texts) if text is None}:
                stream = self.streams[place]
                texts[place] = stream.decode(tokens[place])
                (self._partial.add if stream.partial else self._partial.discard)(place)
        return texts  # type: ignore[return-value]  # no None is left

    def _shown(self, stream: Stream, text: str) -> str:
        assert stream.stop is not None
        num_tokens = len(stream.emitted) + len(self._token_ids)
        return stream.stop.push(text) if num_tokens > stream.sampling.min_tokens else text

    def settle(self) -> None:
        """Tell the journal's entries their tokens."""
        tokens, count = array("i", b"".join(self._token_ids)), len(self.streams)
        for place, stream in enumerate(self.streams) if tokens else ():
            stream.emitted.extend(tokens[place::count])
        self._token_ids.clear()

    def lengths(self) -> Iterator[tuple[Stream, int]]:
        """How many tokens each stream really has."""
        for stream in self.streams:
            yield stream, len(stream.emitted) + len(self._token_ids)

    def check(self) -> None:
        """AssertionError when the columns contradict the streams."""
        starts = unpack_i32(self._starts.column())
        for place, (stream, length) in enumerate(self.lengths()):
            assert starts[place] == length <= stream.sampling.max_tokens
            assert unpack_i32(self._handles)[place] == stream.handle
            assert stream.partial == (place in self._partial)
        for part in self.parts:
            for place, index in zip(part.places, unpack_i32(part.next_index.column()), strict=True):
                assert self.streams[place].frontend == part.frontend
                assert index == starts[place]
