"""The texts of chunks as one, and segments as subtitles. Pure; called by answers.py and stream.py."""

import re
from collections.abc import Iterable

from meshlm.frontend.speech.segments import Segment

TIMES = re.compile(r"<\|\d+\.\d\d\|>")  # a token that is a time, where it is shown
NO_SPACES = ("ja", "lo", "my", "th", "yue", "zh")  # languages that write words without spaces between them


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
    """SubRip: numbered cues."""
    return "".join(f"{number}\n{_cue(segment, ',')}" for number, segment in enumerate(segments, 1))


def vtt(segments: Iterable[Segment]) -> str:
    """WebVTT."""
    return "WEBVTT\n\n" + "".join(_cue(segment, ".") for segment in segments)


def _cue(segment: Segment, point: str) -> str:
    said = " ".join(segment.text.split()).replace("-->", "->")
    return f"{_time(segment.begin_s, point)} --> {_time(segment.end_s, point)}\n{said}\n\n"


def _time(seconds: float, point: str) -> str:
    ms = round(seconds * 1000)
    minutes, ms = divmod(ms, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{ms // 1000:02}{point}{ms % 1000:03}"
