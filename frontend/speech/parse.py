"""A form (multipart/form-data) and samples of audio to what the mesh is asked: a prompt for each chunk of the audio. Pure; HttpError
names the field at fault. Called by routes.py, in a thread."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.openai import limits, sampling_params
from meshlm.frontend.openai.limits import MIN_PROMPT_BYTES
from meshlm.frontend.openai.parsed_request import AnswerOptions, MeshRequest, ParsedRequest
from meshlm.frontend.openai.schema import Common
from meshlm.frontend.speech import schema
from meshlm.frontend.speech.audio_decoder import not_installed
from meshlm.protocol.audio import SAMPLE_RATE, WHISPER_TIMESTAMPS, Audio, SpeechTokens
from meshlm.protocol.config import Resolved, ServerConfig
from meshlm.protocol.edges.text import JoinedPrompt, MediaPrompt, Prompt, TextPrompt, TokenPrompt
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32

if TYPE_CHECKING:
    from meshlm.runtime.audio_samples import Samples

MAX_PARTS = 64
MAX_VALUE_BYTES = MIN_PROMPT_BYTES  # of a field that is no file
FILE = "file"
KINDS: Mapping[schema.SpeechTask, type[schema.SpeechRequest]] = {
    "transcribe": schema.TranscriptionRequest,
    "translate": schema.TranslationRequest,
}
ENGLISH = "en"
TIMED = ("verbose_json", "srt", "vtt")  # forms that say when something is said


class _Parts:
    """Collects what the parser finds: callbacks of python-multipart, which gets the body in one chunk."""

    def __init__(self) -> None:
        self.found: list[tuple[str, bytes]] = []
        self._header, self._headers = [b"", b""], dict[bytes, bytes]()
        self._name, self._size = "", 0
        self._data: list[bytes] = []
        self.is_whole = False

    def callbacks(self) -> Any:
        of_headers = ("header_field", "header_value", "header_end", "headers_finished")
        names = ("part_begin", *of_headers, "part_data", "part_end", "end")
        return {f"on_{name}": getattr(self, name) for name in names}

    def part_begin(self) -> None:
        if len(self.found) == MAX_PARTS:
            raise HttpError(400, f"the form has more than {MAX_PARTS} fields")
        self._headers, self._data, self._size = {}, [], 0

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]

    def header_end(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]

    def headers_finished(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name")
        if not name:
            raise HttpError(400, "a part of the form has no name in its Content-Disposition")
        self._name = name.decode("utf-8", "replace")

    def part_data(self, data: bytes, start: int, end: int) -> None:
        self._size += end - start
        if self._name != FILE and self._size > MAX_VALUE_BYTES:
            name = self._name[:40]
            raise field_error(name, f"more than {MAX_VALUE_BYTES} bytes in one field")
        self._data.append(data[start:end])

    def part_end(self) -> None:
        self.found.append((self._name, b"".join(self._data)))
        self._data = []

    def end(self) -> None:
        self.is_whole = True


def read_form(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    """The names and values of all parts, in order."""
    try:
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser, parse_options_header
    except ImportError:
        raise not_installed("python-multipart") from None

    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        shown = content_type[:60] or "nothing"
        text = f"Content-Type: send the form as multipart/form-data with a boundary, not as {shown!r}"
        raise HttpError(400, text, "Content-Type")
    parts = _Parts()
    try:
        parser = MultipartParser(boundary, parts.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise HttpError(400, f"the body is no valid multipart/form-data: {error}") from None
    if not parts.is_whole:
        raise HttpError(400, "the body is no valid multipart/form-data: its last boundary is missing")
    return parts.found


def fields_of(parts: list[tuple[str, bytes]], lists: tuple[str, ...]) -> dict[str, Any]:
    """Values by name: texts, lists of texts for `lists`, and the file's bytes. An empty text is as good as none."""
    found: dict[str, Any] = {}
    for raw_name, value in parts:
        name = raw_name.removesuffix("[]")
        if name == FILE:
            text: Any = value
        else:
            try:
                text = value.decode()
            except UnicodeDecodeError:
                raise HttpError(400, f"{name[:40]}: is not valid UTF-8", name[:40]) from None
            if not text:
                continue
        if name in lists or (raw_name != name and name != FILE):
            found.setdefault(name, []).append(text)
        elif name in found:
            raise HttpError(400, f"{name[:40]}: this field is given more than once", name[:40])
        else:
            found[name] = text
    return found


class AudioChunk(NamedTuple):
    """A part of the audio that the encoder takes at once."""

    audio: Audio
    begin_s: float

    @property
    def length_s(self) -> float:
        return self.audio.num_samples / SAMPLE_RATE


class Transcription:
    """One audio clip and what is to be written of it. `language` is empty until it is known."""

    def __init__(
        self, body: schema.SpeechRequest, task: schema.SpeechTask, speech: SpeechTokens, language: str
    ) -> None:
        self.task, self.speech, self.language = task, speech, language
        self.response_format, self.temperature = body.response_format, body.temperature
        self.chunks: list[AudioChunk] = []
        self._text = body.prompt.strip()

    @property
    def has_timestamps(self) -> bool:
        return self.response_format in TIMED

    @property
    def zero(self) -> int:
        """The token of 0.00 s; all behind it are times, too."""
        return self.speech.no_timestamps + 1

    @property
    def seconds(self) -> float:
        return sum(chunk.length_s for chunk in self.chunks)

    @property
    def language_written(self) -> str:
        return ENGLISH if self.task == "translate" else self.language

    def cut(self, samples: "Samples") -> None:
        """Fills in the chunks of the audio."""
        from meshlm.frontend.speech.audio_files import ranges  # numpy, which other servers do without

        for begin, end in ranges(samples, self.speech.seconds):
            data = samples[begin:end].astype("<f4", copy=False).tobytes()
            self.chunks.append(AudioChunk(Audio(data), begin / SAMPLE_RATE))

    def prompts(self) -> list[Prompt]:
        """One for each chunk. Where the language is not known yet, another one stands for it."""
        ids = [self.speech.start]
        if languages := self.speech.languages:
            ids.append(languages[self.language] if self.language else next(iter(languages.values())))
            ids.append(self.speech.tasks[self.task])
        if not self.has_timestamps:
            ids.append(self.speech.no_timestamps)
        start, begin = TokenPrompt(pack_i32(ids)), None
        if self._text:
            before = TokenPrompt(pack_i32([self.speech.previous]))
            begin = JoinedPrompt((before, TextPrompt(f" {self._text}", add_special_tokens=False), start))
        return [MediaPrompt(begin or start, (chunk.audio,)) for chunk in self.chunks]


def body_of(fields: dict[str, Any], task: schema.SpeechTask) -> tuple[schema.SpeechRequest, tuple[str, ...]]:
    """The form as its Struct, and the names of fields that nobody knows."""
    for name in schema.NOT_SUPPORTED.keys() & fields.keys():
        if fields.pop(name) not in schema.ASKS_FOR_NOTHING.get(name, ()):
            raise field_error(name, f"{schema.NOT_SUPPORTED[name]}")
    for name in schema.NEEDLESS:
        fields.pop(name, None)
    if task == "transcribe" and fields.pop("to_language", None):
        text = "a transcript is in the language of the audio; /v1/audio/translations gives English"
        raise field_error("to_language", f"{text}")
    if "vllm_xargs" in fields:
        try:
            fields["vllm_xargs"] = msgspec.json.decode(fields["vllm_xargs"])
        except (msgspec.DecodeError, TypeError) as error:
            raise field_error("vllm_xargs", f"is no JSON: {error}") from None
    return bodies.converted(fields, KINDS[task])


def transcription_of(body: schema.SpeechRequest, task: schema.SpeechTask, resolved: Resolved) -> Transcription:
    """What is to be written, before the audio is looked at: refuses what does not go together, or what the model cannot do."""
    speech = resolved.speech
    assert speech is not None
    if body.stream and body.response_format in TIMED:
        text = f"{body.response_format} is not streamed; text and json are"
        raise field_error("response_format", f"{text}")
    for name in ("stream_include_usage", "stream_continuous_usage_stats"):
        if getattr(body, name) and not body.stream:
            raise HttpError(400, f"{name} needs stream: true", name)
    if "word" in body.timestamp_granularities:
        text = "word: the times of words are not supported; those of a segment are"
        raise field_error("timestamp_granularities", f"{text}")
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise field_error("timestamp_granularities", "needs response_format verbose_json")
    if body.prompt.strip() and speech.previous < 0:
        raise field_error("prompt", "this model takes no text of before")
    to_language = getattr(body, "to_language", None)
    if to_language not in (None, ENGLISH):
        raise field_error("to_language", f"{to_language[:40]!r} is not supported; translations are English")
    return Transcription(body, task, speech, _language(body.language, task, speech, resolved.served_names[0]))


def _language(given: str | None, task: schema.SpeechTask, speech: SpeechTokens, model: str) -> str:
    """The code of the audio's language; empty where it is to be found."""
    code = (given or "").lower()
    if not speech.languages:
        if task == "translate":
            raise field_error("model", f"{model} knows English alone, and translates nothing")
        if code not in ("", ENGLISH):
            raise field_error("language", f"{code[:40]!r}: {model} knows English (en) alone")
        return ENGLISH
    if task not in speech.tasks:
        raise field_error("model", f"{model} has no token for the task {task}")
    if code and code not in speech.languages:
        known = ", ".join(sorted(speech.languages))
        raise field_error("language", f"{code[:40]!r} is no language of {model}; it knows {known}")
    return code


def asked(
    body: schema.SpeechRequest,
    unknown: tuple[str, ...],
    transcription: Transcription,
    resolved: Resolved,
    server: ServerConfig,
) -> ParsedRequest:
    """What the mesh is asked, a prompt for each chunk of `transcription`."""
    sampling = _sampling(body, transcription, resolved)
    lengths = (resolved.max_output_tokens, body.max_completion_tokens, resolved.generation_defaults.get("max_tokens"))
    mesh = MeshRequest(
        transcription.prompts(),
        sampling,
        seed=None if body.seed is None else body.seed & 0x7FFF_FFFF_FFFF_FFFF,
        max_tokens=min((int(one) for one in lengths if one is not None), default=None),
        cap_max_tokens=True,
        priority=body.priority,
        timeout_s=body.timeout or 0.0,
    )
    limits.check(mesh, False, resolved)
    force_usage = server.enable_force_include_usage
    answer = AnswerOptions(
        stream=body.stream,
        include_usage=force_usage or body.stream_include_usage,
        continuous_usage=force_usage or (body.stream_include_usage and body.stream_continuous_usage_stats),
        logprobs=sampling.logprobs,
        client_names={"max_tokens": "max_completion_tokens"},
    )
    return ParsedRequest(mesh, answer, unknown, body.request_id or "")


def _sampling(body: schema.SpeechRequest, transcription: Transcription, resolved: Resolved) -> SamplingParams:
    """As for texts, but that nothing is drawn unless the client says so. Log-probabilities tell which characters a token brought."""
    common = Common(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        vllm_xargs=body.vllm_xargs,
    )
    found = sampling_params.from_request(common, resolved, 0 if transcription.has_timestamps else -1, -1)
    if transcription.has_timestamps:
        found = msgspec.structs.replace(found, extra_args={**found.extra_args, WHISPER_TIMESTAMPS: True})
    return msgspec.structs.replace(found, begin_suppress_token_ids=transcription.speech.begin_suppress_tokens)
