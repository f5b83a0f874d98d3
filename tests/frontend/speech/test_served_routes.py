"""Which routes a frontend has whose model transcribes audio, and what its document says of them."""

from typing import Any

import httpx
from audio_clips import Speaking, audio_file, tone
from route_groups import OPERATIONS, VECTORS
from route_groups import SPEECH as ROUTES

from meshlm.frontend.routes import openapi
from meshlm.frontend.routes.application import served
from meshlm.frontend.routes.request_schema import Served

PATH, ENGLISH_PATH = "/v1/audio/transcriptions", "/v1/audio/translations"
WAV = audio_file(tone(1.5))
Json = dict[str, Any]


async def test_a_model_of_sounds_serves_nothing_of_texts() -> None:
    backend = Speaking()
    transport = httpx.ASGITransport(app=backend.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in (
            *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
            *("/v1/conversations", "/v1/embeddings", "/inference/v1/generate", "/generative_scoring"),
        ):
            answer = await client.post(path, json={})
            assert answer.status_code == 404
            error = answer.json()["error"]
            text = error["message"]
            assert "this server" in text
        for path in ("/health", "/v1/models", "/openapi.json", "/metrics"):
            assert (await client.get(path)).status_code == 200
    text_model = Speaking(speech=None)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=text_model.app), base_url="http://localhost"
    ) as client:
        for path in (PATH, ENGLISH_PATH):
            answer = await client.post(path, files={"file": ("a.wav", WAV)})
            assert answer.status_code == 404
            assert "transcribes no audio" in answer.text


def test_which_routes_there_are() -> None:
    paths = {op.path for op in served(documentation=True, development=False, speech=True)}
    assert {PATH, ENGLISH_PATH, "/tokenize", "/v1/models"} <= paths
    assert not paths & {op.path for op in VECTORS}
    assert not paths & {op.path for op in OPERATIONS if op.generates}
    assert not {op.path for op in ROUTES} & {op.path for op in served(documentation=True, development=False)}


def test_the_document_has_the_form() -> None:
    facts = Served(("tiny",), 100, 20, takes_tools=False, takes_templates=False, takes_priorities=False)
    found = openapi.document(served(documentation=True, development=False, speech=True), "1", False, facts)
    operation = found["paths"][PATH]["post"]
    assert operation["requestBody"]["content"] == {
        "multipart/form-data": {"schema": {"$ref": "#/components/schemas/TranscriptionRequest"}}
    }
    kinds = {"application/json", "text/event-stream", "text/plain", "application/x-subrip", "text/vtt"}
    assert set(operation["responses"]["200"]["content"]) == kinds
    schema = found["components"]["schemas"]["TranscriptionRequest"]
    assert schema["properties"]["file"]["format"] == "binary"
    assert "timestamp_granularities[]" in schema["properties"]
    assert schema["required"] == ["file"]
    assert "timestamp_granularities[]" in openapi.page(found)
