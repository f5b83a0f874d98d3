"""What a client reads of an audio clip, whole or as server-sent events: text, segments, subtitles. Pure but for `write`. Called by
generation.py."""

import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from meshlm.frontend.http.operation import SRT, TEXT, VTT
from meshlm.frontend.http.retry import Progress
from meshlm.frontend.openai.responses import DONE, AnswerHead, Json, StreamedAnswer, WholeResponse, data_event
from meshlm.frontend.speech.parse import Transcription
from meshlm.frontend.speech.schema import DurationUsage, TranscriptionResponse, TranscriptionSegment
from meshlm.protocol.edges.text import Finished, PositionLogprobs
from meshlm.protocol.wire.ids import FinishReason
from meshlm.runtime.client.placement import Choice, RowDetails

TICK_S = 0.02  # from one time's token to the next
LEAST_LOGPROB = -9999.0  # JSON has no infinity
TIMES = re.compile(r"<\|\d+\.\d\d\|>")  # a token that is a time, where it is shown
NO_SPACES = ("ja", "lo", "my", "th", "yue", "zh")  # languages that write words without spaces between them
_encode = msgspec.json.Encoder().encode
_OBJECTS = {"transcribe": "transcription.chunk", "translate": "translation.chunk"}


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


class SpeechResponse(WholeResponse):
    """The whole answer, whose choices are the chunks in order."""

    def __init__(self, *arguments: Any, transcription: Transcription) -> None:
        super().__init__(*arguments)
        self._transcription = transcription

    def body(self) -> bytes:
        """The answer in the form that was asked for; call after the end, when `error` is None."""
        match self._transcription.response_format:
            case "json":
                return _encode(TranscriptionResponse(self._text(), usage=self._usage()))
            case "text":
                self.media_type = TEXT
                return f"{self._text()}\n".encode()
            case "srt":
                self.media_type = SRT
                return srt(self._segments()).encode()
            case "vtt":
                self.media_type = VTT
                return vtt(self._segments()).encode()
            case "verbose_json":
                return _encode(self._verbose())

    def _text(self) -> str:
        joiner = Joiner(separator(self._transcription.language_written))
        return "".join(joiner.push(choice.index, self._written(choice.index)) for choice in self.choices)

    def _written(self, chunk: int) -> str:
        return "".join(self._texts.get(chunk, ()))

    def _segments(self) -> list[Segment]:
        transcription, found = self._transcription, list[Segment]()
        ends = self.parsed_request.mesh.sampling.eos_token_ids
        for place, chunk in enumerate(transcription.chunks):
            positions = self._logprobs.get(place, [])
            text, times = self._written(place), (chunk.begin_s, chunk.length_s)
            found += segments_of(positions, text, transcription.zero, ends, *times)
        return found

    def _usage(self) -> DurationUsage | msgspec.UnsetType:
        if self._transcription.task == "translate":
            return msgspec.UNSET
        return DurationUsage("duration", math.ceil(self._transcription.seconds))

    def _verbose(self) -> TranscriptionResponse:
        transcription = self._transcription
        segments = [
            TranscriptionSegment(
                id=number,
                seek=round(segment.seek_s * 100),
                start=segment.begin_s,
                end=segment.end_s,
                text=segment.text,
                tokens=list(segment.token_ids),
                temperature=transcription.temperature,
                avg_logprob=segment.avg_logprob,
                compression_ratio=segment.compression_ratio,
                no_speech_prob=None,
            )
            for number, segment in enumerate(self._segments())
        ]
        told = (transcription.task, transcription.language, transcription.seconds)
        return TranscriptionResponse(self._text(), *told, segments, None, self._usage())


class SpeechStream(StreamedAnswer):
    """A streamed transcription: each event is one of OpenAI's and a chunk of vLLM's. `write` takes complete events.

    Chunks of long audio are computed beside each other, and told in their order: what comes early waits."""

    def __init__(
        self,
        head: AnswerHead,
        write: Callable[[bytes], None],
        progress: Progress | None = None,
        *,
        transcription: Transcription,
    ) -> None:
        super().__init__(head)
        self._write, self._transcription = write, transcription
        self._joiner: Joiner | None = None  # once the language is known
        self._told: list[str] = []
        self._chunk = 0  # that is told now
        self._waiting: dict[int, list[str]] = {}  # texts of chunks behind it
        self._ended: dict[int, Finished] = {}  # by chunk

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        """Tells a row of the chunk whose turn it is; others wait."""
        if self.is_refused:
            return
        finished = None
        if details is not None:
            self.note(choice, details)
            finished = details.finished
        if finished is not None and finished.reason is FinishReason.ERROR:
            self.ended()
            return
        self._waiting.setdefault(choice.index, []).append(text)
        if finished is not None:
            self._ended[choice.index] = finished
        self._tell()
        if finished is not None:
            self.ended()

    def _tell(self) -> None:
        """Sends what is there of the chunk whose turn it is, and of those behind it that follow."""
        if self._joiner is None:
            self._joiner = Joiner(separator(self._transcription.language_written))
        while True:
            new = self._joiner.push(self._chunk, "".join(self._waiting.pop(self._chunk, ())))
            if new:
                self._told.append(new)
                self._write(self._event("transcript.text.delta", [_choice(new)], {"delta": new}, self._usage_so_far()))
            if self._chunk not in self._ended:
                return
            self._chunk += 1

    def _event(self, kind: str, choices: list[Json], extra: Json, usage: Json | None) -> bytes:
        frame = {"type": kind, **extra, **self.frame(_OBJECTS[self._transcription.task], choices)}
        if usage is not None:
            frame["usage"] = usage
        return data_event(frame)

    def _usage_so_far(self) -> Json | None:
        return self._tokens() if self.options.continuous_usage else None

    def _tokens(self) -> Json:
        """By the names of vLLM's and of OpenAI's."""
        usage = self.usage()
        prompt, output = usage["prompt_tokens"], usage["completion_tokens"]
        names: Json = {"type": "tokens", "input_tokens": prompt, "output_tokens": output}
        return {**names, "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def last_events(self) -> bytes:
        """The whole text with the usage, or the error; then [DONE]. In vLLM's way the usage is in a chunk without choices."""
        if self.error is not None:
            return data_event(self.error.response()) + DONE
        last, before = [_choice("", self._finish())], b""
        if self.options.include_usage:
            before = self._event("transcript.text.delta", last, {"delta": ""}, self._usage_so_far())
            last = []
        return before + self._event("transcript.text.done", last, {"text": "".join(self._told)}, self._tokens()) + DONE

    def _finish(self) -> Finished:
        """The end of the last chunk, or of one that its length ended."""
        cut = (end for end in self._ended.values() if end.reason is FinishReason.LENGTH)
        return next(cut, self._ended[len(self.choices) - 1])


def _choice(text: str, finished: Finished | None = None) -> Json:
    ended: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
    if finished is not None:
        ended = {"finish_reason": finished.reason.value, "stop_reason": finished.stop_reason}
    return {"index": 0, "delta": {"content": text}, **ended}
