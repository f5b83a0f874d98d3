"""What a client reads of an audio clip, whole or as server-sent events. Pure but for `write`. Called by generation.py."""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from meshlm.frontend.http.errors import error_object
from meshlm.frontend.openai.responses import AnswerHead, Json, Response, WholeResponse
from meshlm.frontend.requests.retry import Progress
from meshlm.frontend.routes.operation import SRT, TEXT, VTT
from meshlm.frontend.speech.parse import Transcription
from meshlm.frontend.speech.schema import DurationUsage, TranscriptionResponse, TranscriptionSegment
from meshlm.frontend.speech.segments import Joiner, Segment, segments_of, separator, srt, vtt
from meshlm.protocol.edges.text import Finished
from meshlm.protocol.wire.ids import FinishReason
from meshlm.runtime.client.choice import Choice, RowDetails

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"
_OBJECTS = {"transcribe": "transcription.chunk", "translate": "translation.chunk"}


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
            found += segments_of(
                positions, self._written(place), transcription.zero, ends, chunk.begin_s, chunk.length_s
            )
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
        return TranscriptionResponse(
            self._text(),
            transcription.task,
            transcription.language,
            transcription.seconds,
            segments,
            None,
            self._usage(),
        )


class SpeechStream(Response):
    """A streamed transcription: each event is one of OpenAI's and a chunk of vLLM's. `write` takes complete events.

    Chunks of long audio are computed beside each other, and told in their order: what comes early waits.
    """

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
        return b"data: " + _encode(frame) + b"\n\n"

    def _usage_so_far(self) -> Json | None:
        return self._tokens() if self.options.continuous_usage else None

    def _tokens(self) -> Json:
        """By the names of vLLM's and of OpenAI's."""
        usage = self.usage()
        prompt, output = usage["prompt_tokens"], usage["completion_tokens"]
        names: Json = {"type": "tokens", "input_tokens": prompt, "output_tokens": output}
        return {**names, "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def last_events(self) -> bytes:
        """The whole text with the usage, or the error; then [DONE]. A client that asks for the usage in vLLM's way gets it in a chunk
        without choices."""
        if self.error is not None:
            error = error_object(self.error.message, self.error.kind, self.error.param, self.error.status)
            return b"data: " + _encode(error) + b"\n\n" + _DONE
        last, before = [_choice("", self._finish())], b""
        if self.options.include_usage:
            before = self._event("transcript.text.delta", last, {"delta": ""}, self._usage_so_far())
            last = []
        return before + self._event("transcript.text.done", last, {"text": "".join(self._told)}, self._tokens()) + _DONE

    def _finish(self) -> Finished:
        """The end of the last chunk, or of one that its length ended."""
        cut = (end for end in self._ended.values() if end.reason is FinishReason.LENGTH)
        return next(cut, self._ended[len(self.choices) - 1])


def _choice(text: str, finished: Finished | None = None) -> Json:
    ended: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
    if finished is not None:
        ended = {"finish_reason": finished.reason.value, "stop_reason": finished.stop_reason}
    return {"index": 0, "delta": {"content": text}, **ended}
