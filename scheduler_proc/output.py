"""Collects a step's new tokens into one frame per detokenizer."""

from collections.abc import Sequence

from meshlm.protocol.edges.token import ALONE_BYTES, Ended, First, LogprobColumns, TokenDeltas
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, Identity
from meshlm.scheduler_proc import sizes
from meshlm.scheduler_proc.request import Request


class Outbox:
    """Rows for one detokenizer, in batch order."""

    def __init__(self, now_ns: int, dp_rank: int, weights: str = "") -> None:
        self.now_ns, self.dp_rank, self.weights = now_ns, dp_rank, weights
        self.handles: list[int] = []
        self.starts: list[int] = []
        self.tokens: list[int] = []
        self.counts: dict[int, int] = {}  # row -> its tokens, where they are not one
        self.num_detail_bytes = 0
        self.ended: list[Ended] = []
        self.logprobs: dict[int, LogprobColumns] = {}
        self.prompt_logprobs: dict[int, LogprobColumns] = {}
        self.first_tokens: dict[int, First] = {}
        self.pooled: dict[int, bytes] = {}
        self.drafts: dict[int, bytes] = {}

    def token(self, handle: Handle, start: int, token: int) -> int:
        """A row with one token, at output index `start`; its place in the batch."""
        self.handles.append(handle)
        self.starts.append(start)
        self.tokens.append(token)
        return len(self.handles) - 1

    def row(self, handle: Handle, start: int, tokens: Sequence[int]) -> int:
        """A row with any number of tokens, from output index `start` on; its place in the batch."""
        row = len(self.handles)
        if len(tokens) != 1:
            self.counts[row] = len(tokens)
        self.handles.append(handle)
        self.starts.append(start)
        self.tokens += tokens
        return row

    def first(self, row: int, request: Request) -> None:
        """Adds what comes with a request's first token only."""
        queued_ns, prefill_ns = request.started_ns - request.arrived_ns, self.now_ns - request.started_ns
        queued_us, prefill_us = max(0, queued_ns // 1000), max(0, prefill_ns // 1000)
        self.first_tokens[row] = First(request.num_cached, queued_us, prefill_us, self.dp_rank, weights=self.weights)
        request.num_cached = -2
        if request.prompt_logprobs:
            columns = self.prompt_logprobs[row] = concatenate(request.prompt_logprobs)
            self.num_detail_bytes += _num_bytes(columns)
            request.prompt_logprobs = []

    def end(self, row: int, request: Request, reason: FinishReason, stop_token_id: int = -1) -> None:
        ago_us = tuple((self.now_ns - at_ns) // 1000 for at_ns in request.preempted_ns)
        self.ended.append(Ended(row, reason, stop_token_id, preempted_us=ago_us, kv_transfer=request.kv_transfer))

    def rows(self, handles: Sequence[Handle], starts: Sequence[int], tokens: Sequence[int]) -> int:
        """A row for each token of a request; the last one's place in the batch."""
        self.handles.extend(handles)
        self.starts.extend(starts)
        self.tokens.extend(tokens)
        return len(self.handles) - 1

    def message(self, timings_ns: tuple[int, ...]) -> TokenDeltas:
        return TokenDeltas(
            handles=pack_i32(self.handles),
            starts=pack_i32(self.starts),
            counts=pack_i32(self.counts.get(row, 1) for row in range(len(self.handles))) if self.counts else b"",
            token_ids=pack_i32(self.tokens),
            ended=self.ended,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            first=self.first_tokens,
            timings_ns=timings_ns,
            pooled=self.pooled,
            drafts=self.drafts,
        )


class Output:
    def __init__(self, now_ns: int, dp_rank: int, weights: str = "") -> None:
        """weights: the label of the version that computes."""
        self.now_ns, self.dp_rank, self.weights = now_ns, dp_rank, weights
        self.boxes: dict[Identity, Outbox] = {}
        self._full: list[tuple[Identity, Outbox]] = []

    def outbox_of(self, detokenizer: Identity) -> Outbox:
        box = self.boxes.get(detokenizer)
        if box is None:
            box = self.boxes[detokenizer] = Outbox(self.now_ns, self.dp_rank, self.weights)
        return box

    def open_box(self, detokenizer: Identity) -> Outbox:
        """The one that takes further rows; another one, where there are many details already."""
        self.seal(detokenizer)
        return self.outbox_of(detokenizer)

    def add_details(
        self, request: Request, start: int, tokens: Sequence[int], columns: LogprobColumns
    ) -> tuple[Outbox, int]:
        """A row for each token of a request, with its log-probabilities; the last one's box and its place there. columns: of all of
        them, or of more. The first row is in the box that is open."""
        box, row = self.outbox_of(request.detokenizer), -1
        for nth, token in enumerate(tokens):
            if nth:
                box = self.open_box(request.detokenizer)
            row = box.token(request.handle, start + nth, token)
            one = box.logprobs[row] = position_columns(columns, nth)
            box.num_detail_bytes += _num_bytes(one)
        return box, row

    def seal(self, detokenizer: Identity, *, alone: bool = False) -> None:
        """Before a row with details: where there are many already, or it is to be `alone`, it and what comes after it make another
        message."""
        box = self.boxes.get(detokenizer)
        if box is not None and (alone or box.num_detail_bytes > sizes.MAX_STEP_BYTES):
            self._full.append((detokenizer, self.boxes.pop(detokenizer)))

    def vector(self, request: Request, vector: bytes) -> None:
        """Adds the vector that ends a Pool task."""
        self.seal(request.detokenizer, alone=len(vector) > ALONE_BYTES)
        box = self.outbox_of(request.detokenizer)
        row = box.row(request.handle, 0, ())
        box.pooled[row] = vector
        box.num_detail_bytes += len(vector)
        if request.num_cached >= 0:
            box.first(row, request)
        box.end(row, request, FinishReason.STOP)
        self.seal(request.detokenizer, alone=len(vector) > ALONE_BYTES)

    def messages(self, timings_ns: tuple[int, ...]) -> list[tuple[Identity, TokenDeltas]]:
        """The messages with their detokenizers, in the order of sending."""
        return [(to, box.message(timings_ns)) for to, box in (*self._full, *self.boxes.items())]

    def end(
        self,
        request: Request,
        reason: FinishReason,
        message: str = "",
        kind: ErrorKind = ErrorKind.INTERNAL,
        param: str = "",
    ) -> None:
        box = self.outbox_of(request.detokenizer)
        row = box.row(request.work.handle, len(request.tokens) - request.num_prompt, ())
        ago_us = tuple((self.now_ns - at_ns) // 1000 for at_ns in request.preempted_ns)
        box.ended.append(Ended(row, reason, message=message, kind=kind, param=param, preempted_us=ago_us))


def _num_bytes(columns: LogprobColumns) -> int:
    return sum(map(len, (columns.logprobs, columns.ranks, columns.top_ids, columns.top_logprobs)))


def position_columns(columns: LogprobColumns, nth: int) -> LogprobColumns:
    one, top = slice(4 * nth, 4 * nth + 4), slice(4 * nth * columns.width, 4 * (nth + 1) * columns.width)
    return LogprobColumns(
        columns.width, columns.logprobs[one], columns.ranks[one], columns.top_ids[top], columns.top_logprobs[top]
    )


def concatenate(parts: list[LogprobColumns]) -> LogprobColumns:
    """The columns of consecutive chunks of one prompt; their width is the request's own k."""
    if len(parts) == 1:
        return parts[0]
    return LogprobColumns(
        width=parts[0].width,
        logprobs=b"".join(part.logprobs for part in parts),
        ranks=b"".join(part.ranks for part in parts),
        top_ids=b"".join(part.top_ids for part in parts),
        top_logprobs=b"".join(part.top_logprobs for part in parts),
    )
