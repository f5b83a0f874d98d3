"""The routes of Ollama's API (--api ollama): a body to the request of a chat, and from there on the path of every chat.

The server's one model stays loaded; a name may have Ollama's tag `:latest` behind it.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.endpoint import json_response
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.operation import ANY_KEY, NAMED, TEXT, Group, OfClass, route
from meshlm.frontend.http.retry import LAST_ID, refuse_last_id
from meshlm.frontend.ollama import models, schema
from meshlm.frontend.ollama.format import LINES, LineFormat, timestamp
from meshlm.frontend.ollama.translate import LATEST, NAMES, chat_of_messages, chat_of_prompt, completion, is_load
from meshlm.frontend.openai import limits, parse
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.frontend.requests.generation import Backend, Form, Generation, ReadRequest, form_of_turns
from meshlm.frontend.requests.request_reader import RequestReader
from meshlm.frontend.vectors import parse as vectors_parse
from meshlm.frontend.vectors import schema as vectors_schema
from meshlm.frontend.vectors.answers import VectorsResponse
from meshlm.frontend.vectors.routes import Asked, in_parts

VERSION = "0.13.0"  # of Ollama, whose API this is
API = "ollama"
Body = TypeVar("Body", bound=Struct)
_route = partial(route, error=schema.ErrorBody)
_text_route = partial(_route, parameters=NAMED, texts=(LINES,))
_form = partial(form_of_turns, media_type=LINES)
CHAT = _form(lambda parsed_request: LineFormat(True, parsed_request.answer.stream))
PROMPT = _form(lambda parsed_request: LineFormat(False, parsed_request.answer.stream))


def served_name(reader: RequestReader, name: str) -> str:
    """The name that is meant, with or without the tag `:latest`. HttpError."""
    try:
        return reader.check_model(name)
    except HttpError:
        if not name.endswith(LATEST):
            raise
    return reader.check_model(name.removesuffix(LATEST))


class OllamaGeneration:
    routes = OfClass(Group.GENERATION, api=API)

    def __init__(self, backend: Backend, generation: Generation, reader: RequestReader) -> None:
        self._backend, self._generation, self._reader = backend, generation, reader

    @_text_route("/api/chat", "", schema.ChatAnswer, schema.ChatBody)
    async def chat(self, request: Request) -> HttpResponse:
        """Answer a conversation, by Ollama's API."""
        read = await self._reader.read(request, self._chat)
        if isinstance(read, str):
            return _loaded(read, message={"role": "assistant", "content": ""})
        return await self._generation.answer(request, read, "ollama-", CHAT)

    @_text_route("/api/generate", "", schema.GenerateAnswer, schema.GenerateBody)
    async def generate(self, request: Request) -> HttpResponse:
        """Answer a prompt, by Ollama's API."""
        read = await self._reader.read(request, self._generate)
        if isinstance(read, str):
            return _loaded(read, response="")
        return await self._generation.answer(request, read, "ollama-", PROMPT)

    def _chat(self, request: Request, raw: bytes) -> ReadRequest | str:
        """What is asked, or the model's name where it is to be loaded."""
        body, unknown = self._decoded(raw, schema.ChatBody)
        model = served_name(self._reader, body.model)
        if is_load(body):
            return model
        server, resolved = self._backend.config.server, self._backend.resolved
        with parse.renamed(NAMES):
            parsed_request = parse.chat(chat_of_messages(body, server), unknown, resolved, server, media=True)
        return self._read(request, raw, parsed_request, model)

    def _generate(self, request: Request, raw: bytes) -> ReadRequest | str:
        """What is asked, or the model's name where it is to be loaded."""
        body, unknown = self._decoded(raw, schema.GenerateBody)
        model = served_name(self._reader, body.model)
        if is_load(body):
            return model
        server, resolved = self._backend.config.server, self._backend.resolved
        with parse.renamed({**NAMES, "messages": "prompt"}):
            if not (body.raw or body.suffix):
                parsed_request = parse.chat(chat_of_prompt(body, server), unknown, resolved, server, media=True)
            else:
                parsed_request = parse.completion(completion(body), unknown, resolved, server)
                if (body.options or schema.Options()).num_predict in (None, -1, -2):
                    parsed_request = parsed_request.with_mesh(
                        max_tokens=resolved.max_output_tokens, cap_max_tokens=True
                    )
        return self._read(request, raw, parsed_request, model)

    def _decoded(self, raw: bytes, kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
        resolved = self._backend.resolved
        check = partial(limits.check_raw_texts, resolved=resolved, vectors=resolved.spec.media is not None)
        return bodies.decode(raw, kind, check, self._reader.longest)

    def _read(self, request: Request, raw: bytes, parsed_request: ParsedRequest, model: str) -> ReadRequest:
        refuse_last_id(request.headers.get(LAST_ID, ""))
        names = {**parsed_request.answer.client_names, **NAMES, "max_tokens": "options.num_predict"}
        named = parsed_request.with_answer(client_names=names)
        return ReadRequest(named, model, self._reader.idempotency_key(request, raw))


def _loaded(model: str, **said: object) -> HttpResponse:
    """The answer to a client that wants the model to be loaded."""
    return json_response(
        {"model": model, "created_at": timestamp(time.time()), **said, "done": True, "done_reason": "load"}
    )


class OllamaVectors:
    routes = OfClass(Group.VECTORS, parameters=NAMED[:2], api=API)

    def __init__(self, backend: Backend, generation: Generation, reader: RequestReader) -> None:
        self._backend, self._generation, self._reader = backend, generation, reader

    @_route("/api/embed", "Vectors of texts, by Ollama's API.", schema.EmbedAnswer, schema.EmbedBody)
    async def embed(self, request: Request) -> HttpResponse:
        return await self._answer(request, self._embed, _write_embed)

    @_route("/api/embeddings", "The vector of a text.", schema.EmbeddingsAnswer, schema.EmbeddingsBody)
    async def embeddings(self, request: Request) -> HttpResponse:
        return await self._answer(request, self._embeddings, _write_embedding)

    async def _answer(
        self,
        request: Request,
        read: Callable[[Request, bytes], tuple[vectors_schema.EmbeddingRequest, tuple[str, ...], str]],
        write: Callable[[VectorsResponse], bytes],
    ) -> HttpResponse:
        body, unknown, model = await self._reader.read(request, read)
        parsed_request = vectors_parse.embeddings(body, unknown, self._backend.config)
        asked = Asked(parsed_request, model, "embd-", write)
        whole = await in_parts(asked, self._backend, partial(self._reader.ask, request))
        form = Form(partial(VectorsResponse, write=write, parts=whole.parts), StreamResponse)
        return await self._generation.answer(request, ReadRequest(whole.parsed_request, model), "embd-", form)

    def _embed(self, request: Request, raw: bytes) -> tuple[vectors_schema.EmbeddingRequest, tuple[str, ...], str]:
        """What is asked by /api/embed. A text that is too long is cut, unless `truncate` is false."""
        body, unknown = bodies.decode(raw, schema.EmbedBody, longest=self._reader.longest)
        keeps = -1 if body.truncate is not False else None
        asked = vectors_schema.EmbeddingRequest(
            input=body.input, dimensions=body.dimensions, truncate_prompt_tokens=keeps
        )
        return asked, unknown, served_name(self._reader, body.model)

    def _embeddings(self, request: Request, raw: bytes) -> tuple[vectors_schema.EmbeddingRequest, tuple[str, ...], str]:
        body, unknown = bodies.decode(raw, schema.EmbeddingsBody, longest=self._reader.longest)
        asked = vectors_schema.EmbeddingRequest(input=body.prompt, truncate_prompt_tokens=-1)
        return asked, unknown, served_name(self._reader, body.model)


def _write_embed(answer: VectorsResponse) -> bytes:
    first = min(choice.opened_at for choice in answer.choices)
    total = int((time.monotonic() - first) * 1e9)
    found = schema.EmbedAnswer(
        answer.model, [one.tolist() for one in answer.vectors()], total, 0, answer.num_prompt_tokens()
    )
    return msgspec.json.encode(found)


def _write_embedding(answer: VectorsResponse) -> bytes:
    return msgspec.json.encode(schema.EmbeddingsAnswer(answer.vectors()[0].tolist()))


class OllamaInformation:
    routes = OfClass(Group.ANY, key_scope=ANY_KEY, api=API)

    def __init__(self, backend: Backend, reader: RequestReader) -> None:
        self._backend, self._reader = backend, reader

    @_route("/", "That the server runs, as Ollama's clients ask.", TEXT)
    async def root(self, request: Request) -> HttpResponse:
        return HttpResponse("Ollama is running", media_type="text/plain")

    @_route("/api/version", "Ollama's version, whose API this is.", schema.VersionAnswer)
    async def version(self, request: Request) -> HttpResponse:
        return json_response(schema.VersionAnswer(VERSION))

    @_route("/api/tags", "The served names, by Ollama's API.", schema.Tags)
    async def tags(self, request: Request) -> HttpResponse:
        names, resolved = self._backend.adapters.names, self._backend.resolved
        return json_response(await asyncio.to_thread(models.tags, names, resolved))

    @_route("/api/ps", "The same, as models that are loaded.", schema.RunningList)
    async def running(self, request: Request) -> HttpResponse:
        names, resolved = self._backend.adapters.names, self._backend.resolved
        return json_response(await asyncio.to_thread(models.running, names, resolved))

    @_route("/api/show", "", schema.Shown, schema.ShowBody)
    async def show(self, request: Request) -> HttpResponse:
        """What one of them is, and can."""
        await self._reader.read(request, self._show)
        return json_response(await asyncio.to_thread(models.shown, self._backend.config))

    def _show(self, request: Request, raw: bytes) -> str:
        body, _ = bodies.decode(raw, schema.ShowBody, longest=self._reader.longest)
        return self._named(body.model or body.name)

    @_route("/api/pull", "", schema.PullStatus, schema.PullBody, texts=(LINES,))
    async def pull(self, request: Request) -> HttpResponse:
        """That a served model is there; no other can be fetched."""
        await self._reader.read(request, self._pull)
        return json_response(schema.PullStatus("success"))

    def _pull(self, request: Request, raw: bytes) -> str:
        body, _ = bodies.decode(raw, schema.PullBody, longest=self._reader.longest)
        try:
            return self._named(body.model or body.name)
        except HttpError as error:
            text = f"{error.message}; a server has the models that it was started with (meshlm serve MODEL)"
            raise HttpError(error.status, text, error.param) from None

    def _named(self, name: str) -> str:
        if not name:
            raise HttpError(400, "model: give the model's name", "model")
        return served_name(self._reader, name)
