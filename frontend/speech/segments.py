"""What was said when: the tokens of a chunk to segments, by the tokens between them that are times; segments as subtitles, and the
texts of chunks as one. Pure; called by answers.py."""

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshlm.protocol.edges.text import PositionLogprobs

TICK_S = 0.02  # from one time's token to the next
LEAST_LOGPROB = -9999.0  # JSON has no infinity
TIMES = re.compile(r"<\|\d+\.\d\d\|>")  # a token that is a time, where it is shown
NO_SPACES = ("ja", "lo", "my", "th", "yue", "zh")  # languages that write words without spaces between them


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


def segments_of(
    positions: Sequence[PositionLogprobs], text: str, zero: int, ends: Sequence[int], begin_s: float, length_s: float
) -> list[Segment]:
    """The segments of a chunk that begins at `begin_s` of the audio and takes `length_s`; without any time there is one, as long as the
    chunk. `positions` and `text` are its output's; `zero` is the token of 0.00 s, `ends` are tokens that end a text."""
    found: list[Segment] = []
    texts, token_ids, logprob = list[str](), list[int](), 0.0  # of the segment that is being read
    since, at = 0.0, 0

    def close(until: float) -> None:
        nonlocal since, logprob
        said, until = "".join(texts), max(since, min(until, length_s))
        if said.strip():
            mean = max(LEAST_LOGPROB, logprob / len(token_ids))
            times = (round(begin_s + since, 2), round(begin_s + until, 2))
            found.append(Segment(*times, said, tuple(token_ids), mean, begin_s))
        texts.clear()
        token_ids.clear()
        since, logprob = until, 0.0

    for position in positions:
        token = position.token.token_id
        said, at = text[at : at + position.num_chars], at + position.num_chars
        if token in ends:
            continue
        if token < zero:
            texts.append(said)
            token_ids.append(token)
            logprob += position.token.logprob
        elif token_ids:
            close((token - zero) * TICK_S)
        else:
            since = max(since, min((token - zero) * TICK_S, length_s))
    if token_ids:
        close(length_s)
    return found


def separator(language: str) -> str:
    """What stands between the texts of two chunks."""
    return "" if language in NO_SPACES else " "


class Joiner:
    """Joins the texts of chunks, which come in their order and in any parts: each without space around it, and a separator between."""

    def __init__(self, between: str) -> None:
        self._between = between
        self._chunk = -1
        self._space = ""  # that may be the end of the chunk
        self._in_chunk = self._has_said = False

    def push(self, chunk: int, text: str) -> str:
        """What the next part of this chunk's text adds. Tokens that are times come in one part each, and are left out."""
        if chunk != self._chunk:
            self._chunk, self._space, self._in_chunk = chunk, "", False
        text = self._space + TIMES.sub("", text)
        said = text.rstrip()
        self._space = text[len(said) :]
        if not said:
            return ""
        if not self._in_chunk:
            said = (self._between if self._has_said else "") + said.lstrip()
        self._in_chunk = self._has_said = True
        return said


def srt(segments: Iterable[Segment]) -> str:
    return "".join(f"{number}\n{_cue(segment, ',')}" for number, segment in enumerate(segments, 1))


def vtt(segments: Iterable[Segment]) -> str:
    return "WEBVTT\n\n" + "".join(_cue(segment, ".") for segment in segments)


def _cue(segment: Segment, point: str) -> str:
    said = " ".join(segment.text.split()).replace("-->", "->")
    return f"{_time(segment.begin_s, point)} --> {_time(segment.end_s, point)}\n{said}\n\n"


def _time(seconds: float, point: str) -> str:
    ms = round(seconds * 1000)
    minutes, ms = divmod(ms, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{ms // 1000:02}{point}{ms % 1000:03}"
