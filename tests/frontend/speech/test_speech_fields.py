"""What a form asks of the mesh, and what is refused by the name of its field."""

from typing import Any

import msgspec
import numpy as np
import pytest
from audio_clips import (
    DE,
    EN,
    ENGLISH,
    NO_TIMES,
    PREVIOUS,
    SPEECH,
    START,
    TRANSCRIBE,
    TRANSLATE,
    chunks,
    resolved,
    tone,
)
from numpy.typing import NDArray
from request_fields import names

from meshlm.frontend.http.answer_fields import NEEDLESS as NEEDLESS_ANYWHERE
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.requests import submits
from meshlm.frontend.speech import parse
from meshlm.frontend.speech.schema import NEEDLESS, NOT_SUPPORTED, SpeechTask, TranslationRequest
from meshlm.protocol.audio import Audio, SpeechTokens
from meshlm.protocol.config import MeshConfig, Resolved, ServerConfig
from meshlm.protocol.edges.text import JoinedPrompt, MediaPrompt, TextPrompt, TokenPrompt, media_of
from meshlm.protocol.wire.columns import pack_i32

VLLM = names(
    """
    file model language hotwords prompt response_format timestamp_granularities stream stream_include_usage
    stream_continuous_usage_stats vllm_xargs to_language use_beam_search n length_penalty include_stop_str_in_output
    temperature top_p top_k min_p seed frequency_penalty repetition_penalty presence_penalty max_completion_tokens
    """
)
OPENAI = names(
    """
    file model chunking_strategy include keywords known_speaker_names known_speaker_references language languages
    prompt response_format stream temperature timestamp_granularities
    """
)


def ask(
    task: SpeechTask = "transcribe",
    audio: NDArray[np.float32] | None = None,
    server: ServerConfig | None = None,
    model: Resolved | None = None,
    **fields: Any,
) -> ParsedRequest:
    model = model or resolved()
    body, unknown = parse.body_of({"file": b"x", **fields}, task)
    transcription = parse.transcription_of(body, task, model)
    transcription.cut(tone(1.0) if audio is None else audio)
    return parse.asked(body, unknown, transcription, model, server or ServerConfig())


def prefix(asked: ParsedRequest, chunk: int = 0) -> TokenPrompt | JoinedPrompt:
    prompt = asked.mesh.prompts[chunk]
    assert isinstance(prompt, MediaPrompt)
    assert isinstance(prompt.prompt, TokenPrompt | JoinedPrompt)
    return prompt.prompt


def tokens(*ids: int) -> TokenPrompt:
    return TokenPrompt(pack_i32(ids))


def refused(fields: dict[str, Any], task: SpeechTask = "transcribe", speech: SpeechTokens = SPEECH) -> HttpError:
    with pytest.raises(HttpError) as caught:
        ask(task, model=resolved(speech), **fields)
    assert caught.value.param in caught.value.message
    return caught.value


def test_every_field_of_vllms_and_openais_has_an_answer() -> None:
    known = set(TranslationRequest.__struct_fields__) | NOT_SUPPORTED.keys() | NEEDLESS.keys()
    assert (VLLM | OPENAI) - known == set()
    assert set(TranslationRequest.__struct_fields__) & (NOT_SUPPORTED.keys() | NEEDLESS.keys()) == set()


@pytest.mark.parametrize(
    ("task", "fields", "ids"),
    [
        ("transcribe", {"language": "de"}, (START, DE, TRANSCRIBE, NO_TIMES)),
        ("transcribe", {"language": "EN"}, (START, EN, TRANSCRIBE, NO_TIMES)),
        ("translate", {"language": "de", "to_language": "en"}, (START, DE, TRANSLATE, NO_TIMES)),
        ("transcribe", {"language": "de", "response_format": "text"}, (START, DE, TRANSCRIBE, NO_TIMES)),
        ("transcribe", {"language": "de", "response_format": "srt"}, (START, DE, TRANSCRIBE)),
        ("transcribe", {"language": "de", "response_format": "vtt"}, (START, DE, TRANSCRIBE)),
        ("transcribe", {"language": "de", "response_format": "verbose_json"}, (START, DE, TRANSCRIBE)),
    ],
)
def test_what_stands_before_the_text(task: SpeechTask, fields: dict[str, Any], ids: tuple[int, ...]) -> None:
    assert prefix(ask(task, **fields)) == tokens(*ids)


def test_a_model_that_knows_english_alone() -> None:
    model = resolved(ENGLISH)
    assert prefix(ask(model=model)) == tokens(START, NO_TIMES)
    assert prefix(ask(model=model, language="en", response_format="srt")) == tokens(START)
    assert refused({"language": "de"}, speech=ENGLISH).param == "language"
    assert refused({}, "translate", ENGLISH).param == "model"
    assert refused({"prompt": "a"}, speech=ENGLISH).param == "prompt"


def test_the_text_of_before_stands_in_each_chunk() -> None:
    asked = ask(audio=chunks(), language="de", prompt=" Dr. Who \n")
    wanted = JoinedPrompt(
        (tokens(PREVIOUS), TextPrompt(" Dr. Who", add_special_tokens=False), tokens(START, DE, TRANSCRIBE, NO_TIMES))
    )
    assert [prefix(asked, chunk) for chunk in range(len(asked.mesh.prompts))] == [wanted] * 3
    assert prefix(ask(language="de", prompt="  ")) == tokens(START, DE, TRANSCRIBE, NO_TIMES)


def test_the_chunks_are_the_sound() -> None:
    asked = ask(audio=chunks(), language="de")
    data = b"".join(one.samples for prompt in asked.mesh.prompts for one in media_of(prompt) if isinstance(one, Audio))
    assert data == chunks().tobytes()
    assert (asked.mesh.num_choices, len(asked.mesh.prompts)) == (1, 3)


def test_how_tokens_are_drawn() -> None:
    model = resolved(generation_defaults={"temperature": 0.7, "top_p": 0.8, "max_tokens": 448})
    plain = ask(model=model, language="de")
    assert (
        plain.mesh.sampling.temperature,
        plain.mesh.sampling.top_p,
        plain.mesh.max_tokens,
        plain.mesh.cap_max_tokens,
    ) == (0, 0.8, 448, True)
    assert plain.mesh.sampling.begin_suppress_token_ids == SPEECH.begin_suppress_tokens
    assert (plain.mesh.sampling.logit_bias, plain.mesh.sampling.logprobs, plain.answer.logprobs) == ({}, -1, -1)
    assert plain.mesh.sampling.eos_token_ids == model.eos_token_ids
    timed = ask(language="de", response_format="verbose_json")
    assert (timed.mesh.sampling.extra_args, timed.mesh.sampling.logprobs, timed.answer.logprobs) == (
        {"whisper_timestamps": True},
        0,
        0,
    )
    given = ask(
        language="de", temperature="0.5", top_p="0.9", top_k="4", min_p="0.1", frequency_penalty="0.2", seed="7",
        presence_penalty="0.3", repetition_penalty="1.1", max_completion_tokens="9", priority="3", timeout="2.5",
    )  # fmt: skip
    found = given.mesh.sampling
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.5, 0.9, 4, 0.1)
    assert (found.frequency_penalty, found.presence_penalty, found.repetition_penalty) == (0.2, 0.3, 1.1)
    assert (given.mesh.seed, given.mesh.max_tokens, given.mesh.priority, given.mesh.timeout_s) == (7, 9, 3, 2.5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"file": None}, "file"),
        ({"language": "xx"}, "language"),
        ({"language": "german"}, "language"),
        ({"response_format": "xml"}, "response_format"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "-1"}, "temperature"),
        ({"top_p": "0"}, "top_p"),
        ({"seed": "1.5"}, "seed"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "response_format": "verbose_json"}, "response_format"),
        ({"stream": "true", "response_format": "vtt"}, "response_format"),
        ({"stream_include_usage": "true"}, "stream_include_usage"),
        ({"stream_continuous_usage_stats": "1"}, "stream_continuous_usage_stats"),
        ({"timestamp_granularities": ["word"], "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"timestamp_granularities": ["segment"]}, "timestamp_granularities"),
        ({"timestamp_granularities": ["line"]}, "timestamp_granularities"),
        ({"max_completion_tokens": "0"}, "max_completion_tokens"),
        ({"to_language": "fr"}, "to_language"),
        ({"to_language": "en"}, "to_language"),
        ({"vllm_xargs": "{"}, "vllm_xargs"),
        ({"vllm_xargs": "[]"}, "vllm_xargs"),
        ({"vllm_xargs": '{"a": 1}'}, "vllm_xargs"),
        ({"use_beam_search": "true"}, "use_beam_search"),
        ({"n": "2"}, "n"),
        ({"length_penalty": "0.5"}, "length_penalty"),
        ({"hotwords": "MeshLM"}, "hotwords"),
        ({"include": ["logprobs"]}, "include"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, "chunking_strategy"),
        ({"known_speaker_names": ["a"]}, "known_speaker_names"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    error = refused({"language": "de", **fields})
    assert (error.status, error.param) == (400, param)


def test_a_translation_is_english() -> None:
    assert refused({"to_language": "fr"}, "translate").param == "to_language"


@pytest.mark.parametrize(
    "fields",
    [
        {"use_beam_search": "false", "n": "1", "length_penalty": "1.0", "chunking_strategy": "auto"},
        {"include_stop_str_in_output": "true", "user": "me"},
        {"timestamp_granularities": ["segment"], "response_format": "verbose_json"},
    ],
)
def test_what_asks_for_nothing_is_taken(fields: dict[str, Any]) -> None:
    form: dict[str, Any] = {"response_format": fields.get("response_format", "json"), "language": "de"}
    assert ask(**form, **{k: v for k, v in fields.items() if k not in form}) == ask(**form)


def test_unknown_fields_are_told() -> None:
    needless: dict[str, Any] = dict.fromkeys((name for name in NEEDLESS_ANYWHERE if "." not in name), "a")
    assert ask(language="de", zeta="1", **needless).unknown_fields == ("zeta",)


def test_a_prompt_that_is_too_long() -> None:
    assert refused({"prompt": "a" * (1 << 20) + "b"}).param == "prompt"


def test_texts_and_sounds_go_to_their_own_models() -> None:
    config = MeshConfig(resolved=resolved())
    asked = ask(language="de")
    assert submits.permitted(asked, "", config).mesh.prompts == asked.mesh.prompts
    with pytest.raises(HttpError, match="takes no texts") as caught:
        submits.permitted(asked.with_mesh(prompts=[TextPrompt("a")]), "", config)
    assert caught.value.status == 404
    with pytest.raises(HttpError, match="transcribes no audio"):
        submits.permitted(asked, "", msgspec.structs.replace(config, resolved=resolved(None)))
