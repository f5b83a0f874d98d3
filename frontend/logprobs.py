"""Log-probabilities in OpenAI's and vLLM's forms. Pure; called by answers.py."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from meshlm.protocol.text_edge import Accepted, PositionLogprobs, TokenLogprob

Json = dict[str, Any]
Position = TypeVar("Position", PositionLogprobs, PositionLogprobs | None)


def by_id(positions: Sequence[Position]) -> list[Position]:
    """With tokens named "token_id:5", which tells those apart whose text is the same or no text."""

    def named(token: TokenLogprob) -> TokenLogprob:
        return msgspec.structs.replace(token, text=f"token_id:{token.token_id}")

    return [p and PositionLogprobs(named(p.token), tuple(named(top) for top in p.top)) for p in positions]


def _token_entry(token: TokenLogprob) -> Json:
    return {"token": token.text, "logprob": max(token.logprob, -9999.0), "bytes": list(token.token_bytes)}


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> Json:
    """choices[].logprobs of a chat answer."""
    return {
        "content": [{**_token_entry(p.token), "top_logprobs": [_token_entry(top) for top in p.top]} for p in positions]
    }


def completion_logprobs(positions: Sequence[PositionLogprobs | None], offset: int, first: str = "") -> Json:
    """choices[].logprobs of a completion; None stands for a prompt's first token, whose text is `first`."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for position in positions:
        offsets.append(offset)
        if position is None:
            tokens.append(first)
            values.append(None)
            tops.append(None)
            offset += len(first)
            continue
        tokens.append(position.token.text)
        values.append(max(position.token.logprob, -9999.0))
        chosen = {position.token.text: max(position.token.logprob, -9999.0)}
        tops.append({**{top.text: max(top.logprob, -9999.0) for top in position.top}, **chosen})
        offset += len(position.token.text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def echoed_logprobs(positions: Sequence[PositionLogprobs | None] | None, accepted: Accepted) -> Json:
    """choices[].logprobs of an echoed prompt; one of a single token has no positions."""
    return completion_logprobs(positions or [None], 0, accepted.first_token_text)


def prompt_logprobs_json(positions: list[PositionLogprobs | None]) -> list[Json | None]:
    """vLLM's prompt_logprobs: per position, token id -> logprob, rank, text."""

    def entry(token: TokenLogprob) -> Json:
        return {"logprob": max(token.logprob, -9999.0), "rank": token.rank, "decoded_token": token.text}

    return [
        None if p is None else {str(token.token_id): entry(token) for token in (*p.top, p.token)} for p in positions
    ]
