"""Collects one frontend's new text of a batch of token frames into one message."""

from array import array
from collections.abc import Sequence

from msgspec.structs import replace

from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.request_state import NOBODY, RequestState
from meshlm.protocol.edges.text import Finished, PositionLogprobs, PromptLogprobs, TextDeltas
from meshlm.protocol.edges.token import ALONE_BYTES, First, LogprobColumns, TokenDeltas
from meshlm.protocol.logprobs import each_position, num_bytes_of_prompt
from meshlm.protocol.wire.columns import pack_i32, unpack_i32

ENTRY_BYTES = 50  # of a TokenLogprob and its position, without its own bytes, which its text has again
MAX_BATCH_BYTES = 1 << 20  # a batch that has more takes no further rows: its frontend has other requests, too


class FrontendBatch:
    def __init__(self) -> None:
        self.handles: list[int] = []
        self.starts: list[int] = []
        self.tokens: list[int] = []
        self.counts: dict[int, int] = {}  # row -> its tokens in `tokens`, where they are not one
        self.more: dict[int, list[int]] = {}  # row -> tokens after those, not in `tokens` yet
        self.texts: list[str] = []
        self.num_bytes = 0  # of what few rows have, about
        self.finished: list[Finished] = []
        self.logprobs: dict[int, list[PositionLogprobs]] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.first: dict[int, First] = {}
        self.timings: tuple[int, ...] = ()
        self.pooled: dict[int, bytes] = {}

    def row(self, handle: int, start: int, tokens: "array[int] | list[int]", text: str) -> int:
        place = len(self.texts)
        if len(tokens) != 1:
            self.counts[place] = len(tokens)
        self.handles.append(handle)
        self.starts.append(start)
        self.tokens.extend(tokens)
        self.texts.append(text)
        return place

    def token(self, request: RequestState, start: int, token: int, text: str) -> None:
        """One more token of a request. Where its last row is in this batch too (tokens pile up), the row grows."""
        if request.batch is self:
            self.more.setdefault(request.place, []).append(token)
            self.texts[request.place] += text
            return
        request.batch, request.place = self, len(self.texts)
        self.handles.append(request.frontend_handle)
        self.starts.append(start)
        self.tokens.append(token)
        self.texts.append(text)

    def details(
        self, request: RequestState, place: int, taken: int, skip: int, row: int, deltas: TokenDeltas, table: TokenTable
    ) -> None:
        """Adds what few rows have: logprobs and the first token's details. `skip`: tokens of the scheduler's row that are left out."""
        if deltas.timings_ns:
            self.timings = deltas.timings_ns
        if row in deltas.first:
            first, times = deltas.first[row], (request.encode_s, request.route_s)
            self.first[place] = replace(first, encode_us=int(times[0] * 1e6), route_us=int(times[1] * 1e6))
        if row in deltas.logprobs:
            sizes, columns = request.num_chars(table, taken), deltas.logprobs[row]
            if request.submit.retry is not None:
                request.logprobs.add(columns, sizes, skip)
            if request.frontend != NOBODY:
                self.logprobs[place] = positions(columns, request.output_token_ids, sizes, table, skip)
                self.num_bytes += num_bytes(self.logprobs[place])
        if row in deltas.prompt_logprobs:
            self.prompt_logprobs[place] = prompt_logprobs_of(deltas.prompt_logprobs[row], request.prompt, table)
            self.num_bytes += num_bytes_of_prompt(self.prompt_logprobs[place])
        if row in deltas.pooled:
            request.pooled = self.pooled[place] = deltas.pooled[row]
            self.num_bytes += len(request.pooled)
        if request.submit.retry is not None:
            request.prompt_logprobs = self.prompt_logprobs.get(place, request.prompt_logprobs)
            if request.first is None:  # a request that is taken up again finds its own tokens: that is no saving
                request.first = self.first.get(place)

    def add_replayed_row(self, request: RequestState, begin: int, end: int, text: str, table: TokenTable) -> int:
        """A row of tokens that were told before; its place."""
        place = self.row(request.frontend_handle, begin, request.output_token_ids[begin:end], text)
        self.num_bytes += 4 * (end - begin + len(text))
        if len(request.logprobs):
            self.logprobs[place] = found = request.logprobs.entries(begin, end, request.output_token_ids, table)
            self.num_bytes += num_bytes(found)
        return place

    def add_first_details(self, request: RequestState, place: int) -> None:
        """Adds once more what came with a request's first token."""
        if request.first is not None:
            self.first[place] = request.first
        if request.prompt_logprobs is not None:
            self.prompt_logprobs[place] = request.prompt_logprobs
            self.num_bytes += num_bytes_of_prompt(request.prompt_logprobs)

    def add_end(self, request: RequestState, place: int, finished: Finished) -> None:
        self.texts[place] += request.tail
        if request.pooled:
            self.pooled[place] = request.pooled
            self.num_bytes += len(request.pooled)
        self.finished.append(replace(finished, row=place))

    def _spread(self) -> list[int]:
        """Bring the tokens of `more` into their places; all rows' counts."""
        counts, flat, at = [], list[int](), 0
        for row in range(len(self.texts)):
            end = at + self.counts.get(row, 1)
            tokens = self.tokens[at:end] + self.more.get(row, [])
            flat += tokens
            counts.append(len(tokens))
            at = end
        self.tokens = flat
        return counts

    def message(self, now_ns: int = 0) -> TextDeltas:
        counts = self._spread() if self.counts or self.more else []
        return TextDeltas(
            handles=pack_i32(self.handles),
            starts=pack_i32(self.starts),
            counts=pack_i32(counts),
            token_ids=pack_i32(self.tokens),
            texts=self.texts,
            finished=self.finished,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            first=self.first,
            timings_ns=(*self.timings, now_ns) if self.timings else (),
            pooled=self.pooled,
        )


def is_long(deltas: TokenDeltas, row: int) -> bool:
    """Whether a row is so long that it gets a message of its own, which cannot harm the rows before it."""
    return row in deltas.prompt_logprobs or len(deltas.pooled.get(row, b"")) > ALONE_BYTES


def num_bytes(found: Sequence[PositionLogprobs]) -> int:
    """The bytes that these entries take in a message, at most."""
    entries = [entry for position in found for entry in (position.token, *position.top)]
    return sum([ENTRY_BYTES + 4 * len(entry.token_bytes) for entry in entries])


def positions(
    columns: LogprobColumns, ids: "array[int]", sizes: list[int], table: TokenTable, first: int = 0
) -> list[PositionLogprobs]:
    """One entry for each of the last of `ids`, as many as there are `sizes`: the characters that each brings to the text. `first`: of
    them, in the columns."""
    return list(each_position(columns, ids, sizes, len(ids) - len(sizes), table, first))


def prompt_logprobs_of(columns: LogprobColumns, prompt: "array[int]", table: TokenTable) -> PromptLogprobs:
    """A prompt's, which may have a quarter of a million entries: here they are only brought into a set."""
    reader = table.decoder(skip_special_tokens=False)
    _, *sizes = (len(reader.push(token)) for token in prompt)
    distinct = {*prompt, *unpack_i32(columns.top_ids)} - {-1}
    cut = {token: table.cut[token] for token in distinct if token in table.cut}
    whole = array("i", [token for token in distinct if token not in cut])
    texts = [table.show(token)[0] for token in whole]
    return PromptLogprobs(columns, prompt.tobytes(), array("i", sizes).tobytes(), whole.tobytes(), texts, cut)
