"""The routes for sounds: a form to prompts for the mesh. Called by server.py's table of routes.

A body counts as incoming until its sound is decoded, in one of a few threads. Then it is a request like others; where the client does
not say the language, a step before it finds that (language.py).
"""

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend import retry
from meshlm.frontend.errors import HttpError
from meshlm.frontend.generation import Backend, Form, Generation
from meshlm.frontend.messages.routes import check_last_id
from meshlm.frontend.parse import ParsedRequest
from meshlm.frontend.speech import form, language, parse
from meshlm.frontend.speech.answers import SpeechResponse
from meshlm.frontend.speech.parse import Heard
from meshlm.frontend.speech.schema import LISTS, SpeechTask
from meshlm.frontend.speech.stream import SpeechStream

DECODED_AT_ONCE = 2  # sounds; each may take --max-audio-seconds of samples
PREFIXES: dict[SpeechTask, str] = {"transcribe": "transcribe-", "translate": "translate-"}


class Reads(NamedTuple):
    """What server.py does for every route."""

    body: Callable[[Request], AbstractAsyncContextManager[bytes]]
    again: Callable[[Request, bytes], retry.IdempotencyKey | None]
    check_model: Callable[[str | None], str]


class Asked(NamedTuple):
    """One request: what the mesh is asked, of which sound, the model's name, and whether it may come again."""

    ask: ParsedRequest
    heard: Heard
    model: str
    again: retry.IdempotencyKey | None


class SpeechRoutes:
    """See the module docstring."""

    def __init__(self, backend: Backend, generation: Generation, reads: Reads) -> None:
        self._backend, self._generation, self._reads = backend, generation, reads
        self._decoders = asyncio.Semaphore(DECODED_AT_ONCE)

    async def transcriptions(self, request: Request) -> HttpResponse | None:
        """POST /v1/audio/transcriptions."""
        return await self._answer(request, "transcribe")

    async def translations(self, request: Request) -> HttpResponse | None:
        """POST /v1/audio/translations."""
        return await self._answer(request, "translate")

    async def _answer(self, request: Request, task: SpeechTask) -> HttpResponse | None:
        async with self._reads.body(request) as raw, self._decoders:
            asked = await asyncio.to_thread(self._read, request, raw, task)
        heard, prepare = asked.heard, None
        if not heard.language:
            prepare = partial(self._with_language, heard)
        made = Form(partial(SpeechResponse, heard=heard), partial(SpeechStream, heard=heard), before_start=prepare)
        try:
            return await self._generation.answer(request, asked.ask, asked.model, PREFIXES[task], asked.again, made)
        except HttpError as error:
            if error.param == "prompt" and "--max-concurrent-bytes" in error.message:  # the sound is what is large
                raise HttpError(error.status, error.message, form.FILE, error.kind) from None
            raise

    async def _with_language(self, heard: Heard, ask: ParsedRequest, request_id: str, rank: int) -> ParsedRequest:
        """The request with the prompts of the language that is heard in the first piece."""
        sound = heard.pieces[0].sound
        heard.language = await language.find(self._backend, ask, heard.speech, sound, request_id, rank)
        return ask._replace(prompts=heard.prompts())

    def _read(self, request: Request, raw: bytes, task: SpeechTask) -> Asked:
        """What the body asks for. It changes nothing here."""
        from meshlm.frontend.speech import sound_files  # numpy, which other servers do without

        resolved, server = self._backend.resolved, self._backend.config.server
        fields = form.fields_of(form.read(request.headers.get("content-type", ""), raw), LISTS)
        check_last_id(request.headers.get(retry.LAST_ID, ""))
        again = self._reads.again(request, _identity(fields))
        body, unknown = parse.body_of(fields, task)
        model = self._reads.check_model(body.model)
        heard = parse.heard_of(body, task, resolved)
        if len(body.file) > server.max_audio_bytes:
            text = f"file: {len(body.file)} bytes; at most {server.max_audio_bytes} are taken (--max-audio-bytes)"
            raise HttpError(413, text, form.FILE)
        heard.cut(sound_files.decode(body.file, server.max_audio_seconds))
        return Asked(parse.asked(body, unknown, heard, resolved, server), heard, model, again)


def _identity(fields: dict[str, Any]) -> bytes:
    """The request as JSON, for telling it from others: with the file's digest, and without what only divides the parts of the body."""
    file = fields.get(form.FILE, b"")
    return msgspec.json.encode({**fields, form.FILE: hashlib.sha256(file).hexdigest()})
