"""What was said when: the tokens of a chunk to segments, by the tokens between them that are times. Pure; called by answers.py."""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from meshlm.protocol.edges.text import PositionLogprobs

TICK_S = 0.02  # from one time's token to the next
LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Segment(NamedTuple):
    """What is said from `begin_s` to `end_s` of the whole audio."""

    begin_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]
    avg_logprob: float
    seek_s: float  # where its chunk begins

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text over bytes of what zlib makes of it: high where it repeats itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))


class _Open:
    """The segment that is being read."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprob = 0.0


def segments_of(
    positions: Sequence[PositionLogprobs], text: str, zero: int, ends: Sequence[int], begin_s: float, length_s: float
) -> list[Segment]:
    """The segments of a chunk that begins at `begin_s` of the audio and takes `length_s`; without any time there is one, as long as the
    chunk. `positions` and `text` are its output's; `zero` is the token of 0.00 s, `ends` are tokens that end a text."""
    found: list[Segment] = []
    open_, since, at = _Open(), 0.0, 0

    def close(until: float) -> None:
        nonlocal open_, since
        said, until = "".join(open_.texts), max(since, min(until, length_s))
        if said.strip():
            mean = max(LEAST_LOGPROB, open_.logprob / len(open_.token_ids))
            times = (round(begin_s + since, 2), round(begin_s + until, 2))
            found.append(Segment(*times, said, tuple(open_.token_ids), mean, begin_s))
        open_, since = _Open(), until

    for position in positions:
        token = position.token.token_id
        said, at = text[at : at + position.num_chars], at + position.num_chars
        if token in ends:
            continue
        if token < zero:
            open_.texts.append(said)
            open_.token_ids.append(token)
            open_.logprob += position.token.logprob
        elif open_.token_ids:
            close((token - zero) * TICK_S)
        else:
            since = max(since, min((token - zero) * TICK_S, length_s))
    if open_.token_ids:
        close(length_s)
    return found
