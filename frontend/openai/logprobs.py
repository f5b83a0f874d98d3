"""Log-probabilities in OpenAI's and vLLM's forms. Pure; called by responses.py."""

from collections.abc import Sequence
from typing import Any

import msgspec

from meshlm.protocol.edges.text import Accepted, PositionLogprobs, PromptLogprobs, TokenLogprob
from meshlm.protocol.logprobs import positions_of

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


def by_id(positions: Sequence[PositionLogprobs]) -> list[PositionLogprobs]:
    """The same entries with tokens named "token_id:5", which tells tokens apart whose text is the same or empty."""

    def named(token: TokenLogprob) -> TokenLogprob:
        return msgspec.structs.replace(token, text=f"token_id:{token.token_id}")

    return [PositionLogprobs(named(p.token), p.num_chars, tuple(map(named, p.top))) for p in positions]


def _token_entry(token: TokenLogprob) -> Json:
    return {"token": token.text, "logprob": max(token.logprob, -9999.0), "bytes": list(token.token_bytes)}


def chat_logprobs(positions: Sequence[PositionLogprobs], *, has_sampled: bool) -> Json:
    """choices[].logprobs of a chat answer. has_sampled: top_logprobs begin with the token itself where it is not one of them."""

    def top(position: PositionLogprobs) -> tuple[TokenLogprob, ...]:
        if not has_sampled or any(token.token_id == position.token.token_id for token in position.top):
            return position.top
        return position.token, *position.top

    return {
        "content": [
            {**_token_entry(p.token), "top_logprobs": [_token_entry(token) for token in top(p)]} for p in positions
        ]
    }


def completion_logprobs(positions: Sequence[PositionLogprobs], offset: int, num_top: int) -> Json:
    """choices[].logprobs of a completion. `offset` is where the first token's text begins."""
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for position in positions:
        offsets.append(offset)
        offset += position.num_chars
        top: dict[str, float] = {}
        for token in (position.token, *position.top[:num_top]):  # the likeliest of those whose text is the same stays
            top.setdefault(token.text, max(token.logprob, -9999.0))
        tops.append(top)
    return {
        "tokens": [position.token.text for position in positions],
        "token_logprobs": [max(position.token.logprob, -9999.0) for position in positions],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def echoed_logprobs(positions: Sequence[PositionLogprobs], accepted: Accepted, num_top: int, as_ids: bool) -> Json:
    """choices[].logprobs of an echoed prompt, whose first token has none; one of a single token has no positions."""
    first = accepted.first_token_text
    if as_ids:
        first = f"token_id:{memoryview(accepted.prompt_token_ids).cast('i')[0]}"
    rest = completion_logprobs(positions, len(accepted.first_token_text), num_top)
    begin = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {key: [begin[key], *values] for key, values in rest.items()}


def prompt_logprobs_json(found: PromptLogprobs | None) -> list[msgspec.Raw | None]:
    """vLLM's prompt_logprobs: per position, token id -> logprob, rank, text; the prompt's own token first. Each position is encoded as
    soon as it is made: this runs in a thread, and one call that takes long would hold up the others. None: of a prompt of one token."""

    def entry(token: TokenLogprob) -> Json:
        return {"logprob": max(token.logprob, -9999.0), "rank": token.rank, "decoded_token": token.text}

    positions = positions_of(found) if found is not None else ()
    each = (_encode({str(token.token_id): entry(token) for token in (p.token, *p.top)}) for p in positions)
    return [None, *map(msgspec.Raw, each)]
