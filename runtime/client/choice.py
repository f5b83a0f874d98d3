"""One sequence that is being generated, and what its caller does with news of it. Owned by request_tracker.py."""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import Struct

from meshlm.protocol.edges.text import Accepted, Finished, PositionLogprobs, PromptLogprobs, Submit
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity
from meshlm.runtime.process.deaths import Death

MAX_SEED = 0x7FFF_FFFF_FFFF_FFFF


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence that is being generated, and what its caller has of it."""

    sink: "ResponseSink"
    index: int
    prompt_index: int
    submit: Submit  # of this sequence alone, for the case that it must be continued alone
    handle: Handle
    detokenizer: Identity | None = None
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    # The log-probabilities of token_ids; kept only with a Retry, for its detokenizer's next incarnation.
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    affixes: tuple[bytes, bytes] | None = (
        None  # its sink's: what stands around the text, where that alone makes a chunk
    )
    finished: Finished | None = None
    first: First | None = None  # what came with its first token
    engine: str = ""  # the rank that computes it, as clients know it; empty before its first token
    pooled: bytes = b""  # the vector of a pooling request, once it is finished: float32
    num_prompt_tokens: int = 0  # known once its prompt is encoded
    num_told: int = 0  # first tokens that connections before had, and their frontends counted
    begun_with: int = 0  # tokens at this attempt's begin
    num_in_hand: int = 0  # deaths of detokenizers that had it in hand
    deaths: tuple[Death, ...] = ()  # that it met since the last token
    retried: tuple[tuple[float, str], ...] = ()  # when its detokenizer was lost, and it went on at another
    orphan_since: float = 0.0  # since when it has no detokenizer; 0: it has one, or nobody has looked yet
    opened_at: float = 0.0  # when it was asked for, on this connection
    accepted_at: float = 0.0  # when its prompt was encoded; 0: it is not yet
    first_at: float = 0.0  # when its first token came; 0: none yet
    last_at: float = 0.0  # when its latest tokens came
    returned_s: float = 0.0  # from the end of its first token's step until that token came


class RowDetails(Struct, frozen=True):
    """The details that only few rows have beside tokens and text."""

    finished: Finished | None = None
    logprobs: list[PositionLogprobs] | None = None  # one for each token of the row
    prompt_logprobs: PromptLogprobs | None = None
    first: First | None = None


NO_DETAILS = RowDetails()


class ResponseSink(Protocol):
    """The side of a request that hears of its choices' tokens, ends and failures."""

    choices: list[Choice]  # all of them
    has_begun: bool  # the first token of any of them came; set by request_tracker.py

    def accepted(self, choice: Choice, accepted: Accepted) -> None: ...
    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        """`num_tokens` new tokens came, the last ones of `choice.token_ids`. Nearly all rows have no details."""
        ...

    def failed(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None: ...


def choices_of(sink: ResponseSink, submit: Submit, prompt_index: int = 0) -> list[Choice]:
    """A Choice for each sequence of a Submit, the next ones of its sink. Each draws from the Submit's seed and its own index."""
    found, sampling, retry = list[Choice](), submit.sampling, submit.retry
    for index, (handle, name) in enumerate(zip(submit.handles, submit.request_ids, strict=True)):
        own = msgspec.structs.replace(
            submit,
            handles=(handle,),
            request_ids=(name,),
            sampling=msgspec.structs.replace(sampling, seed=(sampling.seed + index) & MAX_SEED),
            retry=None if retry is None else msgspec.structs.replace(retry, cuts=retry.cuts[index : index + 1]),
        )
        found.append(Choice(sink, len(sink.choices) + index, prompt_index, own, handle))
    sink.choices += found
    return found
