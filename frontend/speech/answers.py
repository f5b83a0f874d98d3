"""What a client reads of an audio clip when all is written. Pure; streamed answers are stream.py's. Called by generation.py."""

import math
from typing import Any

import msgspec

from meshlm.frontend.openai.responses import WholeResponse
from meshlm.frontend.routes.operation import SRT, TEXT, VTT
from meshlm.frontend.speech import texts
from meshlm.frontend.speech.parse import Transcription
from meshlm.frontend.speech.schema import DurationUsage, TranscriptionResponse, TranscriptionSegment
from meshlm.frontend.speech.segments import Segment, segments_of

_encode = msgspec.json.Encoder().encode


class SpeechResponse(WholeResponse):
    """The answer, whose choices are the chunks in order."""

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
                return texts.srt(self._segments()).encode()
            case "vtt":
                self.media_type = VTT
                return texts.vtt(self._segments()).encode()
            case "verbose_json":
                return _encode(self._verbose())

    def _text(self) -> str:
        joiner = texts.Joiner(texts.separator(self._transcription.language_written))
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
