"""One sequence that is being generated, and what its HTTP request does with news of it (responses.py). Owned by request_tracker.py."""

from array import array
from typing import Protocol

from msgspec import Struct

from meshlm.protocol.edges.text import Accepted, Finished, PositionLogprobs, PromptLogprobs, Submit
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity
from meshlm.runtime.process.deaths import Death


class Choice:
    """One sequence that is being generated, and what its client has of it."""

    __slots__ = (
        "accepted_at",
        "affixes",
        "begun_with",
        "deaths",
        "detokenizer",
        "engine",
        "finished",
        "first",
        "first_at",
        "handle",
        "index",
        "last_at",
        "logprobs",
        "num_in_hand",
        "num_prompt_tokens",
        "num_told",
        "opened_at",
        "orphan_since",
        "pooled",
        "prompt_index",
        "retried",
        "returned_s",
        "sink",
        "submit",
        "token_ids",
    )

    def __init__(self, sink: "ResponseSink", index: int, prompt_index: int, submit: Submit, handle: Handle) -> None:
        self.sink, self.index, self.prompt_index = sink, index, prompt_index
        self.submit, self.handle = submit, handle
        self.detokenizer: Identity | None = None
        self.token_ids: array[int] = array("i")
        self.logprobs: list[
            PositionLogprobs
        ] = []  # of token_ids; only with a Retry, for its detokenizer's next incarnation
        self.affixes: tuple[bytes, bytes] | None = None  # its sink's: around the text, where that alone makes a chunk
        self.finished: Finished | None = None
        self.first: First | None = None  # what came with its first token
        self.engine = ""  # the rank that computes it, as clients know it; "" before its first token
        self.pooled = b""  # of a Pool, once it is finished: float32
        self.num_prompt_tokens = 0  # once its prompt is encoded
        self.num_told = 0  # first tokens that connections before had, and their frontends counted
        self.begun_with = 0  # tokens at this attempt's begin
        self.num_in_hand = 0  # deaths of detokenizers that had it in hand
        self.deaths: tuple[Death, ...] = ()  # that it met since the last token
        self.retried: tuple[tuple[float, str], ...] = ()  # when its detokenizer was lost, and it went on at another
        self.orphan_since = 0.0  # without a detokenizer; 0: it has one, or nobody has looked yet
        self.opened_at = 0.0  # when it was asked for, on this connection
        self.accepted_at = 0.0  # when its prompt was encoded; 0: it is not yet
        self.first_at = self.last_at = 0.0  # when its first and its latest tokens came; 0: none yet
        self.returned_s = 0.0  # from the end of its first token's step until that token came


class RowDetails(Struct, frozen=True):
    """The details that only few rows have beside tokens and text."""

    finished: Finished | None = None
    logprobs: list[PositionLogprobs] | None = None  # one for each token of the row
    prompt_logprobs: PromptLogprobs | None = None
    first: First | None = None


NO_DETAILS = RowDetails()


class ResponseSink(Protocol):
    """The side of an HTTP request that hears of its choices' tokens, ends and failures (responses.py)."""

    choices: list[Choice]  # all of them
    has_begun: bool  # the first token of any of them came; set by request_tracker.py

    def accepted(self, choice: Choice, accepted: Accepted) -> None: ...
    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        """`num_tokens` new tokens came, the last ones of `choice.token_ids`. Nearly all rows have no details."""
        ...

    def failed(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None: ...
