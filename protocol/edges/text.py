"""frontend <-> detokenizer: prompts go in, text comes out.

A `Submit` may carry several choices of one prompt; each is a request of its own with its own id, handle and
seed. The frontend's handles are echoed in every answer, so a batch of deltas needs no strings for names.
"""

from msgspec import Struct

from meshlm.protocol.edges.token import First, LogprobColumns
from meshlm.protocol.extras import Extras, num_bytes
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, RequestId


class TextPrompt(Struct, frozen=True, tag="text"):
    """A prompt to be tokenized; `add_special_tokens` as in Hugging Face tokenizers."""

    text: str
    add_special_tokens: bool = True
    suffix: str = ""  # what comes behind the answer, for models that fill in the middle; empty: nothing is known of it


class TokenPrompt(Struct, frozen=True, tag="tokens"):
    """A prompt already in token ids (int32 column)."""

    token_ids: bytes


class ChatPrompt(Struct, frozen=True, tag="chat"):
    """A conversation for the chat template. The JSON is the client's, validated in outline by the frontend."""

    messages_json: bytes
    tools_json: bytes = b""
    chat_template: str = ""  # empty: the model's own
    template_kwargs_json: bytes = b""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


class PairPrompt(Struct, frozen=True, tag="pair", omit_defaults=True):
    """Two texts that a classifier compares, as its tokenizer puts them together."""

    first: str
    second: str
    joined: bool = False  # one text behind the other, as models that write text take them
    max_first: int = 0  # tokens of the first that stay; 0: all
    max_second: int = 0


class JoinedPrompt(Struct, frozen=True, tag="joined"):
    """Prompts that are tokenized apart and stand one behind the other."""

    parts: tuple[TextPrompt | TokenPrompt, ...]


class MediaPrompt(Struct, frozen=True, tag="media"):
    """A prompt with media. Vectors in a chat stand where its messages have `prompt_embeds.mark(number)`."""

    prompt: TextPrompt | TokenPrompt | ChatPrompt | JoinedPrompt
    media: Extras


Prompt = TextPrompt | TokenPrompt | ChatPrompt | PairPrompt | JoinedPrompt | MediaPrompt


def media_of(prompt: Prompt) -> Extras:
    """The media of a prompt, which become extras of its request."""
    return prompt.media if isinstance(prompt, MediaPrompt) else ()


def num_bytes_of(prompt: Prompt) -> int:
    """The bytes that the prompt takes on the wire and in memory, about."""
    match prompt:
        case TokenPrompt(token_ids=ids):
            return len(ids)
        case TextPrompt(text=text, suffix=suffix):
            text += suffix
            return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        case JoinedPrompt(parts=parts):
            return sum(map(num_bytes_of, parts))
        case MediaPrompt(prompt=plain, media=media):
            return num_bytes_of(plain) + num_bytes(media)
        case PairPrompt(first=first, second=second):
            return len((first + second).encode("utf-8", "surrogatepass"))
        case ChatPrompt():
            lists = len(prompt.messages_json) + len(prompt.tools_json) + len(prompt.template_kwargs_json)
            return lists + len(prompt.chat_template.encode("utf-8", "surrogatepass"))


class TextParams(Struct, frozen=True, omit_defaults=True):
    """The things that the detokenizer does with the output beyond decoding it."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    # that are shown all the same, by their text: tags that the frontend reads
    keep_special_tokens: tuple[str, ...] = ()
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int = 0  # keep k prompt tokens; 0: all
    truncation_side: str = "left"  # where it is cut; "right" keeps the first k
    bad_words: tuple[str, ...] = ()  # the detokenizer makes SamplingParams.bad_words_token_ids of them


class Retry(Struct, frozen=True, omit_defaults=True):
    """Marks a request with an Idempotency-Key. Its request ids are made from `key`, so a Submit of ids that are known attaches to them:
    all rows come again, to the newer connection, and the older one gets a Rejected."""

    key: str  # hexadecimal digest of the client's key; it also says which detokenizer has the request
    body: bytes  # digest of what was asked; something else under the same key is refused
    cuts: tuple[int, ...] = ()  # by choice: the output tokens that the client has; a row of deltas must begin there
    begun_s: float = 0.0  # resume: wall clock, when it was asked for the first time


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    """A token with its log-probability (natural log), its text and its place among all tokens (1 = likeliest)."""

    token_id: int
    logprob: float
    rank: int
    text: str
    token_bytes: bytes


# Of TokenLogprob; about 256 KB, and tens of milliseconds of a frontend. What is told again of a request comes in pieces of so many.
PIECE_ENTRIES = 1 << 13


def piece_len(num_logprobs: int) -> int:
    """Positions of one piece, with so many likeliest tokens each."""
    return max(1, PIECE_ENTRIES // (num_logprobs + 1)) if num_logprobs >= 0 else PIECE_ENTRIES


class PositionLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """The sampled (or prompt) token of one position, and the k likeliest there."""

    token: TokenLogprob
    num_chars: int  # that the token brought to the text: none where its character goes on or it is not shown
    top: tuple[TokenLogprob, ...] = ()


class PromptLogprobs(Struct, frozen=True):
    """Log-probabilities of a prompt's tokens but the first, with what their texts need (logprobs.py makes the entries)."""

    columns: LogprobColumns
    token_ids: bytes  # int32[p + 1], the prompt
    num_chars: bytes  # int32[p], that each token brought to the text
    text_ids: bytes  # int32, each token of the prompt and of the likeliest once ...
    texts: list[str]  # ... and its text, but for
    cut: dict[int, bytes] = {}  # those that begin or end inside a character, and their bytes


class Delivered(Struct, frozen=True, tag="delivered"):
    """Before a Submit that goes on with a request with a Retry: log-probabilities of the tokens that its client has, in pieces and in
    order. A newer connection may ask for them again."""

    request_id: RequestId
    logprobs: tuple[PositionLogprobs, ...]


class Submit(Struct, frozen=True, tag="submit"):
    """Ask for one prompt's choices. Sent again with `attempt` + 1 and `delivered` after a detokenizer's death."""

    handles: tuple[Handle, ...]
    request_ids: tuple[RequestId, ...]
    prompt: Prompt
    sampling: SamplingParams  # choice i uses seed + i
    text: TextParams = TextParams()
    max_tokens: int | None = None  # None: whatever the context leaves; else overrides sampling.max_tokens
    cap_max_tokens: bool = False  # where the context leaves fewer than max_tokens, end there instead of refusing
    attempt: int = 0
    delivered: bytes = b""  # resume (one choice): output ids the client has, int32
    num_logprobs: int = 0  # ... and how many of theirs came before in Delivered, with a Retry
    want_ids: bool = False  # Accepted carries the prompt's token ids
    want_text: bool = False  # Accepted carries the prompt as text
    priority: int = 0  # lower is sooner
    cache_salt: str = ""
    arrival_s: float = 0.0  # wall clock, for FCFS across processes and for queue time
    deadline_s: float = 0.0  # wall clock; 0: none
    dp_rank: int = -1  # -1: the coordinator chooses
    retry: Retry | None = None
    extras: Extras = ()
    weights: str = ""  # resume: which version of the weights computed the last of `delivered`
    suspect: bool = False  # a detokenizer died with it in hand: it is encoded beside no other suspect


class Abort(Struct, frozen=True, tag="abort"):
    """The client left: end these choices. Unknown ids are ignored."""

    request_ids: tuple[RequestId, ...]


class Detach(Struct, frozen=True, tag="detach"):
    """The client of these choices (with a Retry) left and may come back: let them run, send nothing.

    Row i is ignored unless the request is still the one of handles[i]: a newer connection may have it."""

    request_ids: tuple[RequestId, ...]
    handles: tuple[Handle, ...]


class Attach(Struct, frozen=True, tag="attach"):
    """Send this request's deltas again from output token `from_index`, to the asking frontend under `handle`."""

    handle: Handle
    request_id: RequestId
    from_index: int = 0


class Tokenize(Struct, frozen=True, tag="tokenize"):
    handle: Handle
    prompt: Prompt
    want_strings: bool = False
    want_offsets: bool = False
    want_assistant_mask: bool = False


class Detokenize(Struct, frozen=True, tag="detokenize"):
    handle: Handle
    token_ids: bytes
    output: TextParams | None = None  # decode them as the output of a request with these; None: all that they are
    each: bool = False  # each for itself instead, as log-probabilities name tokens


class Cancel(Struct, frozen=True, tag="cancel"):
    """Nobody waits for the answer to this Tokenize or Detokenize any more."""

    handle: Handle


FrontendToDetokenizer = Cancel | Delivered | Submit | Abort | Detach | Attach | Tokenize | Detokenize


class Accepted(Struct, frozen=True, tag="accepted"):
    """The prompt is encoded and journalled; deltas follow."""

    handles: tuple[Handle, ...]
    num_prompt_tokens: int
    prompt_token_ids: bytes = b""  # with want_ids
    prompt_text: str = ""  # with want_text ...
    first_token_text: str = ""  # ... and the part of it that is the first token's, which has no log-probability
    arrival_s: float = 0.0  # with a Retry: when the request first came
    num_told: tuple[int, ...] = ()  # with a Retry, by handle: tokens that connections before had; (): none had any


class Rejected(Struct, frozen=True, tag="rejected"):
    """The terminal message of requests that were never started."""

    handles: tuple[Handle, ...]
    kind: ErrorKind
    message: str
    param: str = ""


class RequestEvent(Struct, frozen=True, array_like=True):
    """Something that happened to a request on its way, so long before its end; clocks of two hosts are not compared."""

    ago_us: int
    name: str  # "preemption", "retry"
    reason: str = ""


class Finished(Struct, frozen=True, omit_defaults=True):
    """The end of one request. `row` is its place in the batch of deltas that carries it."""

    row: int
    reason: FinishReason
    stop_reason: str | int | None = None  # the stop string or stop token id that matched
    num_output_tokens: int = 0
    message: str = ""  # with ERROR: what happened
    kind: ErrorKind = ErrorKind.INTERNAL
    param: str = ""  # with INVALID: the field at fault
    events: tuple[RequestEvent, ...] = ()
    drafts: bytes = b""  # uint8[., 2]: tokens drafted and accepted, step by step, where they are counted by request
    kv_transfer: bytes = b""  # as in Ended


class TextDeltas(Struct, frozen=True, tag="deltas", omit_defaults=True):
    """One step's news for one frontend, in batch order; row i is handles[i].

    The text sent so far is a pure function of the token ids sent so far, so a resumed stream repeats nothing."""

    handles: bytes  # int32[n]
    starts: bytes  # int32[n]: output index of the row's first token here
    counts: bytes  # int32[n]: tokens of the row; b"" means one each
    token_ids: bytes  # int32[sum(counts)], rows after each other
    texts: list[str]  # [n]; "" while a character or a possible stop string is incomplete
    finished: list[Finished] = []
    logprobs: dict[int, list[PositionLogprobs]] = {}  # row -> one per token
    prompt_logprobs: dict[int, PromptLogprobs] = {}  # row
    first: dict[int, First] = {}  # row -> what came with its first token
    timings_ns: tuple[int, ...] = ()  # of the newest step in it, as in token.py, and then when this message left
    pooled: dict[int, bytes] = {}  # row -> float32: the vector of a Pool, with its end


class TokenizeReply(Struct, frozen=True, tag="tokenized"):
    handle: Handle
    token_ids: bytes = b""
    strings: tuple[str, ...] = ()
    offsets: bytes = b""  # int32[2 t]: where each token begins and ends in the text, in characters
    max_model_len: int = 0
    error: str = ""
    param: str = ""
    kind: ErrorKind = ErrorKind.INVALID  # of the error
    # uint8[t]: 1 for tokens that the template marks as the assistant's; none: it marks nothing
    assistant_mask: bytes = b""


class DetokenizeReply(Struct, frozen=True, tag="detokenized"):
    handle: Handle
    text: str = ""
    num_chars: bytes = b""  # int32, that each token of an output brought to the text
    error: str = ""
    param: str = ""
    kind: ErrorKind = ErrorKind.INVALID  # of the error
    texts: tuple[str, ...] = ()  # with `each`, and their bytes
    token_bytes: tuple[bytes, ...] = ()


DetokenizerToFrontend = Accepted | Rejected | TextDeltas | TokenizeReply | DetokenizeReply
