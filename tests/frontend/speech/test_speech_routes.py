"""/v1/audio/transcriptions and /v1/audio/translations, by OpenAI's own client and by plain HTTP, of a frontend without a mesh."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import openai
import pytest
from audio_clips import DE, EN, JA, NO_TIMES, START, TRANSCRIBE, TRANSLATE, ZERO, Speaking, audio_file, chunks, tone
from openai.types.audio import Transcription, TranscriptionVerbose, Translation
from openai_client import client_of

from meshlm.frontend.speech.schema import TranscriptionResponse
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.edges.text import Finished, MediaPrompt, TokenPrompt, media_of
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason

PATH, ENGLISH_PATH = "/v1/audio/transcriptions", "/v1/audio/translations"
WAV = audio_file(tone(1.5))
LONG = audio_file(chunks())
PIECES = [[(40, " One"), (41, " two. ")], [(42, " Three")], [(43, " four"), (44, ".")]]
Json = dict[str, Any]


def timed(begin: float, text: str, end: float) -> list[tuple[int, str]]:
    marks = [(ZERO + round(at * 50), f"<|{at:.2f}|>") for at in (begin, end)]
    return [marks[0], (40, text), marks[1]]


async def post(
    backend: Speaking,
    fields: Json | None = None,
    *,
    path: str = PATH,
    file: bytes = WAV,
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    transport = httpx.ASGITransport(app=backend.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(path, data=fields or {}, files={"file": ("a.wav", file)}, headers=headers)
    assert answer.status_code == status, answer.text
    return answer


async def events(backend: Speaking, fields: Json, **more: Any) -> list[Json]:
    answer = await post(backend, {"stream": "true", **fields}, **more)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *found, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(one.removeprefix("data: ")) for one in found]


def prefixes(backend: Speaking) -> list[TokenPrompt]:
    return [submit.prompt.prompt for submit in backend.submits if isinstance(submit.prompt, MediaPrompt)]  # type: ignore[misc]


# --- whole answers ---


async def test_openais_client_reads_a_transcript() -> None:
    backend = Speaking()
    found = await client_of(backend).audio.transcriptions.create(file=("a.wav", WAV), model="tiny", language="de")
    assert isinstance(found, Transcription)
    assert found.text == "Hello you."
    assert found.usage is not None
    assert found.usage.to_dict() == {"type": "duration", "seconds": 2}
    assert prefixes(backend) == [TokenPrompt(pack_i32([START, DE, TRANSCRIBE, NO_TIMES]))]


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # of the client's code
async def test_openais_client_reads_a_translation() -> None:
    backend = Speaking()
    client = client_of(backend)
    found = await client.audio.translations.create(file=("a.wav", WAV), model="tiny", extra_body={"language": "ja"})
    assert isinstance(found, Translation)
    assert found.to_dict() == {"text": "Hello you."}
    assert prefixes(backend) == [TokenPrompt(pack_i32([START, JA, TRANSLATE, NO_TIMES]))]


async def test_the_language_is_found_first() -> None:
    backend = Speaking()
    answer = await post(backend, {"response_format": "verbose_json", "seed": "5"})
    first, second = backend.submits
    assert prefixes(backend) == [TokenPrompt(pack_i32(ids)) for ids in ([START], [START, DE, TRANSCRIBE])]
    assert media_of(first.prompt) == media_of(second.prompt) != ()
    assert first.max_tokens == 1
    assert set(first.sampling.allowed_token_ids) == {EN, DE, JA}
    assert (first.sampling.temperature, second.sampling.seed) == (0.0, 5)
    assert answer.json()["language"] == "de"
    assert len(backend.closed) == 2
    assert [one.parsed_request.mesh.prompts for one in backend.answers] == [[second.prompt]]


async def test_openais_client_reads_segments() -> None:
    backend = Speaking()
    backend.written = [timed(0, " One.", 1.5), [(41, " Two")], timed(0.5, " three", 1.0)]
    found = await client_of(backend).audio.transcriptions.create(
        file=("a.wav", LONG), model="tiny", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert isinstance(found, TranscriptionVerbose)
    assert (found.text, found.language, found.duration) == ("One. Two three", "de", 5.0)
    segments = found.segments or []
    assert [(one.id, one.text) for one in segments] == [(0, " One."), (1, " Two"), (2, " three")]
    assert (segments[0].start, segments[0].end) == (0.0, 1.5)
    assert segments[1].start == pytest.approx(segments[1].seek / 100)
    assert segments[2].start == pytest.approx(segments[1].end + 0.5)
    assert segments[2].end - segments[2].start == pytest.approx(0.5)
    assert segments[2].tokens == [40]
    assert (segments[0].avg_logprob, segments[0].temperature) == (-0.5, 0.0)


@pytest.mark.parametrize("fields", [{"language": "de"}, {"language": "de", "response_format": "verbose_json"}])
@pytest.mark.parametrize("path", [PATH, ENGLISH_PATH])
async def test_answers_are_as_declared(fields: Json, path: str) -> None:
    backend = Speaking()
    backend.written = [timed(0, " One.", 1.5)]
    answer = (await post(backend, fields, path=path)).json()
    read = msgspec.to_builtins(msgspec.convert(answer, TranscriptionResponse))
    assert read == answer
    assert ("usage" in answer) == (path == PATH)


@pytest.mark.parametrize(
    ("form", "media_type", "text"),
    [
        ("text", "text/plain; charset=utf-8", "One.\n"),
        ("srt", "application/x-subrip", "1\n00:00:00,000 --> 00:00:01,500\nOne.\n\n"),
        ("vtt", "text/vtt; charset=utf-8", "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne.\n\n"),
    ],
)
async def test_texts(form: Any, media_type: str, text: str) -> None:
    backend = Speaking()
    backend.written = [timed(0, " One.", 1.5)]
    answer = await post(backend, {"response_format": form, "language": "de"})
    assert (answer.headers["content-type"], answer.text) == (media_type, text)
    found = await client_of(backend).audio.transcriptions.create(file=WAV, model="tiny", response_format=form)
    assert found == text


async def test_chunks_are_joined_in_order() -> None:
    backend = Speaking()
    backend.written, backend.backwards = PIECES, True
    assert (await post(backend, {"language": "de"}, file=LONG)).json()["text"] == "One two. Three four."
    assert (await post(backend, {"language": "ja"}, file=LONG)).json()["text"] == "One two.Threefour."
    answer = await post(backend, {"language": "ja"}, file=LONG, path=ENGLISH_PATH)
    assert answer.json()["text"] == "One two. Three four."


# --- streams ---


async def test_openais_client_reads_a_stream() -> None:
    backend = Speaking()
    backend.written = PIECES
    client = client_of(backend)
    stream = await client.audio.transcriptions.create(file=("a.wav", LONG), model="tiny", stream=True)
    found = [event async for event in stream]
    *deltas, done = found
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas if event.type == "transcript.text.delta") == done.text
    assert done.text == "One two. Three four."
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (36, 8, 44)


@pytest.mark.parametrize("backwards", [False, True])
async def test_clients_of_vllms_read_the_same_stream(backwards: bool) -> None:
    backend = Speaking()
    backend.written, backend.backwards = PIECES, backwards
    found = await events(backend, {"language": "de"}, file=LONG, headers={"X-Request-Id": "one"})
    assert {(one["id"], one["object"], one["model"]) for one in found} == {
        ("transcribe-one", "transcription.chunk", "tiny")
    }
    choices = [one["choices"][0] for one in found]
    assert "".join(one["delta"]["content"] for one in choices) == "One two. Three four."
    assert [one["finish_reason"] for one in choices] == [None] * (len(found) - 1) + ["stop"]
    assert all("usage" not in one for one in found[:-1])


async def test_usage_in_vllms_way() -> None:
    backend = Speaking()
    usage: Json = {"stream_include_usage": "true", "stream_continuous_usage_stats": "true"}
    *found, finish, last = await events(backend, {"language": "de", **usage})
    assert [one["usage"]["completion_tokens"] for one in found] == [1, 2]
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert (last["choices"], last["type"], last["text"]) == ([], "transcript.text.done", "Hello you.")
    assert {key: last["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15
    }  # fmt: skip
    (first, *_) = await events(backend, {"language": "de"}, path=ENGLISH_PATH)
    assert first["object"] == "translation.chunk"


async def test_a_stream_of_nothing_and_one_that_its_length_ends() -> None:
    backend = Speaking()
    backend.written = [[]]
    (only,) = await events(backend, {"language": "de"})
    assert (only["type"], only["text"]) == ("transcript.text.done", "")
    backend.written, backend.finished = PIECES, Finished(0, FinishReason.LENGTH)
    *_, last = await events(backend, {"language": "de"}, file=LONG)
    assert last["choices"][0]["finish_reason"] == "length"


async def test_an_error_in_a_stream() -> None:
    backend = Speaking()
    backend.failure = (ErrorKind.INTERNAL, "given up", "")
    *_, last = await events(backend, {"language": "de"})
    assert last["error"]["message"] == "given up"
    with pytest.raises(openai.APIError):
        async for _ in await client_of(backend).audio.transcriptions.create(file=WAV, model="tiny", stream=True):
            pass


async def test_rows_may_come_together() -> None:
    backend = Speaking(ServerConfig(stream_interval=8))
    backend.written = PIECES
    *_, last = await events(backend, {"language": "de"}, file=LONG)
    assert last["text"] == "One two. Three four."


# --- refusals ---


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("language_fails", [False, True])
async def test_a_request_that_is_refused_has_its_status(stream: str, language_fails: bool) -> None:
    backend = Speaking()
    backend.written = [[]]
    backend.failure, backend.language_fails = (ErrorKind.INVALID, "prompt: too long", "prompt"), language_fails
    fields = {"stream": stream} if language_fails else {"stream": stream, "language": "de"}
    answer = await post(backend, fields, status=400)
    assert answer.json()["error"]["param"] == "prompt"
    assert len(backend.answers) == 1


@pytest.mark.parametrize(
    ("file", "fields", "status", "param"),
    [
        (b"hello", {}, 400, "file"),
        (b"", {}, 400, "file"),
        (audio_file(tone(9.0, 8_000), rate=8_000), {}, 400, "file"),
        (bytes(200_001), {}, 413, "file"),
        (WAV, {"model": "other"}, 404, "model"),
        (WAV, {"language": "xx"}, 400, "language"),
        (WAV, {"priority": "1"}, 400, "priority"),
        (WAV, {"request_id": "a b"}, 400, "request_id"),
    ],
)
async def test_refusals(file: bytes, fields: Json, status: int, param: str) -> None:
    backend = Speaking(ServerConfig(responses_store="off", max_audio_bytes=200_000, max_audio_seconds=8))
    answer = await post(backend, fields, file=file, status=status)
    assert answer.json()["error"]["param"] == param
    assert backend.submits == []
    assert len(backend.refusals) == 1


async def test_bodies_have_their_limit() -> None:
    backend = Speaking(ServerConfig(responses_store="off", max_body_bytes=10_000))
    assert "--max-body-bytes" in (await post(backend, status=413)).text
    backend = Speaking(ServerConfig(responses_store="off", max_incoming_bytes=70_000))
    large = audio_file(tone(6.0))
    assert "--max-incoming-bytes" in (await post(backend, file=large, status=503)).text
    assert backend.routes.reader._incoming.num_bytes == 0


async def test_a_large_sound_is_no_json() -> None:
    """Bytes that would be more arrays than a body of JSON may have are taken."""
    await post(Speaking(), {"language": "de"}, file=audio_file(tone(1.0)) + b"[" * (5 << 20))


async def test_what_has_no_room_is_the_file() -> None:
    backend = Speaking()
    backend.budget.max_bytes = 100_000
    error = (await post(backend, {"language": "de"}, status=400)).json()["error"]
    assert (error["param"], "--max-concurrent-bytes" in error["message"]) == ("file", True)


async def test_a_body_that_is_no_form() -> None:
    backend = Speaking()
    transport = httpx.ASGITransport(app=backend.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(PATH, json={"model": "tiny"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Content-Type")
        answer = await client.post(PATH, files={"model": (None, "tiny")})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")


# --- as for other routes ---


async def test_an_idempotency_key_names_the_request() -> None:
    backend = Speaking()
    headers = {"Idempotency-Key": "a"}
    for path, file in ((PATH, WAV), (PATH, WAV), (PATH, LONG), (ENGLISH_PATH, WAV)):
        backend.written = PIECES
        await post(backend, {"language": "de"}, path=path, file=file, headers=headers)
    names = [(submit.retry.key, submit.retry.body) for submit in backend.submits if submit.retry is not None]
    first, again, other, *_, translated = names
    assert first == again
    assert (other[0], other[1] != first[1]) == (first[0], True)
    assert translated[0] != first[0]
    assert backend.submits[0].request_ids == backend.submits[1].request_ids
    await post(backend, {"language": "de"}, headers={**headers, "Last-Event-ID": "3"}, status=400)


async def test_ids_priorities_keys_and_fields_that_nobody_knows() -> None:
    config = ServerConfig(responses_store="off", api_key=("k",))
    backend = Speaking(config)
    backend.config = msgspec.structs.replace(
        backend.config, scheduler=msgspec.structs.replace(backend.config.scheduler, scheduling_policy="priority")
    )
    fields = {"language": "de", "priority": "7", "zeta": "1", "request_id": "me"}
    await post(backend, fields, status=401)
    answer = await post(backend, fields, headers={"Authorization": "Bearer k"})
    assert answer.headers["X-Request-Id"] == "transcribe-me"
    assert backend.submits[0].priority == 7
    assert backend.ignored_fields == ("zeta",)


@pytest.mark.parametrize("finds_language", [True, False])
async def test_a_client_that_leaves_ends_its_request(finds_language: bool) -> None:
    backend = Speaking()
    backend.go.clear()
    fields = {} if finds_language else {"language": "de"}
    request = httpx.Request("POST", f"http://localhost{PATH}", data=fields, files={"file": ("a.wav", WAV)})
    messages = [{"type": "http.request", "body": request.read(), "more_body": False}]
    sent = list[Json]()

    async def receive() -> Json:
        if messages:
            return messages.pop()
        await backend.asked.wait()
        return {"type": "http.disconnect"}

    async def send(message: Json) -> None:
        sent.append(message)

    headers = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
    scope = {
        "type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b"",
        "headers": headers, "http_version": "1.1", "scheme": "http", "server": ("x", 80),
    }  # fmt: skip
    async with asyncio.timeout(20):
        await backend.app(scope, receive, send)
    assert sent == []
    assert len(backend.submits) == len(backend.closed) == 1
    assert len(backend.answers) == 1
