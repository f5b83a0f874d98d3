"""The forms of /v1/audio/transcriptions and /v1/audio/translations, and their answers in JSON: OpenAI's fields and vLLM's extras.

msgspec checks types and ranges and its message names the field; what needs more than one field is checked in parse.py.
"""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from meshlm.frontend.http.answer_fields import ANSWER
from meshlm.frontend.openai import schema as openai

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
SpeechTask = Literal["transcribe", "translate"]
LISTS = ("timestamp_granularities",)  # whose fields may come several times, with [] behind the name or without

_SPEAKERS = "speakers are not told apart"
# Fields of OpenAI and vLLM that decide what the answer is: why they are refused ...
NOT_SUPPORTED = {
    "hotwords": "Whisper has none; name such words in prompt",
    "keywords": "not supported; name such words in prompt",
    "languages": "not supported; give language, or none for the language that is heard first",
    "include": "log-probabilities of a transcript are not supported",
    "chunking_strategy": "only auto is supported: long audio is cut at its quietest places",
    "known_speaker_names": _SPEAKERS,
    "known_speaker_references": _SPEAKERS,
    "use_beam_search": "not supported for audio",
    "n": "there is one answer for an audio clip",
    "length_penalty": "beams are not supported for audio",
}
# ... and their values that ask for nothing, as a form has them; an empty one never does.
ASKS_FOR_NOTHING = {
    "chunking_strategy": ("auto", '"auto"'),
    "use_beam_search": ("false", "0"),
    "n": ("1",),
    "length_penalty": ("1", "1.0"),
}
NEEDLESS = {"include_stop_str_in_output": "no text ends the answer"}


class SpeechRequest(Struct, frozen=True, kw_only=True):
    """The fields that both routes take. `file` is an audio file."""

    changes: ClassVar[tuple[str, ...]] = (ANSWER,)

    file: bytes
    model: str | None = None
    language: str | None = None  # ISO 639-1, of the audio; none: it is found
    prompt: str = ""
    response_format: ResponseFormat = "json"
    timestamp_granularities: list[Literal["word", "segment"]] = []
    temperature: openai.Temperature = 0.0
    stream: bool = False
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False
    max_completion_tokens: openai.Count | None = None  # of each chunk of long audio
    seed: openai.Seed | None = None
    top_p: openai.Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=openai.MAX_TOKENS)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    frequency_penalty: openai.Penalty | None = None
    presence_penalty: openai.Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    vllm_xargs: dict[str, Any] | None = None  # in JSON
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] = 0
    request_id: openai.RequestName | None = None
    timeout: Annotated[float, Meta(gt=0.0, le=openai.MAX_TIMEOUT_S)] | None = None
    user: str | None = None


class TranscriptionRequest(SpeechRequest, frozen=True, kw_only=True):
    """POST /v1/audio/transcriptions, multipart/form-data."""


class TranslationRequest(SpeechRequest, frozen=True, kw_only=True):
    """POST /v1/audio/translations, multipart/form-data."""

    to_language: str | None = None  # en


class DurationUsage(Struct):
    type: Literal["duration"]
    seconds: int  # rounded up


class TranscriptionSegment(Struct):
    """What is said from `start` to `end`, in seconds of the whole audio. seek: where its chunk begins, in 0.01 s."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: None


class TranscriptionResponse(Struct):
    """With verbose_json task, language, duration (seconds), segments and words are there, too; a translation has no usage."""

    text: str
    task: SpeechTask | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    segments: list[TranscriptionSegment] | UnsetType = UNSET
    words: UnsetType | None = UNSET
    usage: DurationUsage | UnsetType = UNSET
