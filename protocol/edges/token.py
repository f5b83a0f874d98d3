"""scheduler <-> detokenizer: one batched frame of new tokens per step and detokenizer, columns in batch order."""

from msgspec import Struct

from meshlm.protocol.edges.admit import Readmit
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle

ALONE_BYTES = 64 << 10  # a longer vector travels in a message of its own, so that tokens do not wait for it
HANDLED = 5  # the place in timings_ns of the moment at which a step's result was handled


class Ended(Struct, frozen=True, omit_defaults=True):
    """The end of the request in `row` of the batch that carries this."""

    row: int
    reason: FinishReason
    stop_token_id: int = -1  # the token id that stopped it; -1: none. It is the last of the row's tokens.
    message: str = ""
    kind: ErrorKind = ErrorKind.INTERNAL
    param: str = ""  # with INVALID: the field at fault
    preempted_us: tuple[int, ...] = ()  # when it was preempted, in microseconds before this end
    kv_transfer: bytes = b""  # kv_transfer_params of the answer, JSON: where its prompt's KV is leased to another mesh


class LogprobColumns(Struct, frozen=True):
    """Log-probabilities of some positions, natural log. k may differ between requests; width is the largest.

    For position p: the sampled token's logprob and rank (1 = likeliest), and its k likeliest tokens in order."""

    width: int
    logprobs: bytes  # float32[p]
    ranks: bytes  # int32[p]
    top_ids: bytes = b""  # int32[p * width], -1 past a request's own k
    top_logprobs: bytes = b""  # float32[p * width]


class First(Struct, frozen=True, omit_defaults=True):
    """The details that come with a request's first token. A stream that is taken up again has another one, which counts for nothing."""

    num_cached_tokens: int  # of the prompt, found in the prefix cache
    queued_us: int = 0  # that it waited at its scheduler for a place in the batch
    prefill_us: int = 0  # from then to its first token
    dp_rank: int = 0  # that computed it, by the number that clients know
    # from its prompt's arrival at the detokenizer to its tokens; the detokenizer adds this and the next
    encode_us: int = 0
    route_us: int = 0  # from then to the coordinator's word which rank has it
    weights: str = (
        ""  # the version of the weights that computed this token, and those after it until another First comes
    )


class TokenDeltas(Struct, frozen=True, tag="tokens", omit_defaults=True):
    """New output tokens. Row i belongs to handles[i]; its tokens have output indices starts[i] .. + counts[i] - 1."""

    handles: bytes  # int32[n]
    starts: bytes  # int32[n]
    counts: bytes  # int32[n]; b"" means one each
    token_ids: bytes  # int32[sum(counts)]
    ended: list[Ended] = []
    logprobs: dict[int, LogprobColumns] = {}  # row -> its new tokens
    prompt_logprobs: dict[int, LogprobColumns] = {}  # row -> prompt positions 1 .. len-1, with its first token
    first: dict[int, First] = {}  # row
    timings_ns: tuple[int, ...] = ()  # step, then monotonic planned, received, launched, done, handled; gpu, gap
    pooled: dict[int, bytes] = {}  # row -> float32: the vector of a Pool, with its end
    # row, the first of a step -> uint8[., 2]: tokens drafted and accepted; where they are counted by request
    drafts: dict[int, bytes] = {}


SchedulerToDetokenizer = TokenDeltas | Readmit


class AttachTokens(Struct, frozen=True, tag="attach"):
    """A gap was seen: send this request's tokens again from `from_index`."""

    handle: Handle
    from_index: int


class Disown(Struct, frozen=True, tag="disown"):
    """Tokens keep coming for these handles, which are nobody's: an abort was lost with its coordinator. End them."""

    handles: bytes  # int32


class StillThere(Struct, frozen=True, tag="still_there"):
    """The coordinator may have died, or lost the rank, before it said of some of these that they were given back. The scheduler
    answers Readmit with those that it does not have."""

    handles: bytes  # int32


DetokenizerToScheduler = AttachTokens | Disown | StillThere
