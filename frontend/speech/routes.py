"""The routes for audio: a form to prompts for the mesh. Called by the table of routes.

A body counts as incoming until its audio is decoded, in a child of this process. Then it is a request like others; where the client
does not say the language, a step before it finds that.
"""

import asyncio
import hashlib
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import retry
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.operation import NAMED, SRT, TEXT, VTT, Group, OfClass, route
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.requests.admission import name_of
from meshlm.frontend.requests.beams import Step
from meshlm.frontend.requests.generation import Backend, Form, Generation, ReadRequest
from meshlm.frontend.requests.request_reader import RequestReader
from meshlm.frontend.speech import parse, schema
from meshlm.frontend.speech.answers import SpeechResponse, SpeechStream
from meshlm.frontend.speech.audio_decoder import AudioDecoder
from meshlm.frontend.speech.parse import Transcription
from meshlm.frontend.speech.schema import LISTS, SpeechTask
from meshlm.protocol.audio import Audio, SpeechTokens
from meshlm.protocol.edges.text import MediaPrompt, TextParams, TokenPrompt
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.runtime.process import in_hand

DECODED_AT_ONCE = 2  # audio; each may take --max-audio-seconds of samples
PREFIXES: dict[SpeechTask, str] = {"transcribe": "transcribe-", "translate": "translate-"}
clip_route = partial(
    route, answers=schema.TranscriptionResponse, streams=True, is_form=True, texts=(TEXT, SRT, VTT), parameters=NAMED
)


class SpeechRoutes:
    routes = OfClass(Group.SPEECH)

    def __init__(self, backend: Backend, generation: Generation, reader: RequestReader) -> None:
        self._backend, self._generation, self._reader = backend, generation, reader
        self._decoders = asyncio.Semaphore(DECODED_AT_ONCE)
        server = backend.config.server
        self._decoder = AudioDecoder(server.max_audio_bytes, server.max_audio_seconds)

    @clip_route("/v1/audio/transcriptions", body=schema.TranscriptionRequest)
    async def transcriptions(self, request: Request) -> HttpResponse:
        """Write down what is said in an audio clip."""
        return await self._answer(request, "transcribe")

    @clip_route("/v1/audio/translations", body=schema.TranslationRequest)
    async def translations(self, request: Request) -> HttpResponse:
        """Write down in English what is said in an audio clip."""
        return await self._answer(request, "translate")

    async def _answer(self, request: Request, task: SpeechTask) -> HttpResponse:
        async with self._reader.body(request, is_json=False) as raw, self._decoders:
            name = name_of(request.url.path, raw)
            async with self._backend.poison.turn(name):
                of_body = await asyncio.to_thread(in_hand.holding, name, self._read, request, raw, task)
        read, transcription = of_body
        prepare = None if transcription.language else partial(self._with_language, transcription)
        whole, stream = (
            partial(SpeechResponse, transcription=transcription),
            partial(SpeechStream, transcription=transcription),
        )
        try:
            form = Form(whole, stream, before_start=prepare)
            return await self._generation.answer(request, read, PREFIXES[task], form)
        except HttpError as error:
            if error.param == "prompt" and "--max-concurrent-bytes" in error.message:  # the audio is what is large
                raise HttpError(error.status, error.message, parse.FILE, error.kind) from None
            raise

    async def _with_language(
        self, transcription: Transcription, parsed_request: ParsedRequest, request_id: str, rank: int
    ) -> ParsedRequest:
        """The request with the prompts of the language that is heard in the first chunk."""
        audio = transcription.chunks[0].audio
        of_request = (transcription.speech, audio, request_id, rank)
        transcription.language = await find_language(self._backend, parsed_request, *of_request)
        return parsed_request.with_mesh(prompts=transcription.prompts())

    def _read(self, request: Request, raw: bytes, task: SpeechTask) -> tuple[ReadRequest, Transcription]:
        """What the body asks for, and of which audio. It changes nothing here."""
        resolved, server = self._backend.resolved, self._backend.config.server
        fields = parse.fields_of(parse.read_form(request.headers.get("content-type", ""), raw), LISTS)
        retry.refuse_last_id(request.headers.get(retry.LAST_ID, ""))
        # Told from others by its fields, with the file's digest: not by what only divides the parts of the body.
        digest = hashlib.sha256(fields.get(parse.FILE, b"")).hexdigest()
        idempotency_key = self._reader.idempotency_key(request, msgspec.json.encode({**fields, parse.FILE: digest}))
        body, unknown = parse.body_of(fields, task)
        model = self._reader.check_model(body.model)
        transcription = parse.transcription_of(body, task, resolved)
        if len(body.file) > server.max_audio_bytes:
            text = f"file: {len(body.file)} bytes; at most {server.max_audio_bytes} are taken (--max-audio-bytes)"
            raise HttpError(413, text, parse.FILE)
        transcription.cut(self._decoder.decode(body.file))
        parsed_request = parse.asked(body, unknown, transcription, resolved, server)
        return ReadRequest(parsed_request, model, idempotency_key), transcription


async def find_language(
    backend: Backend, parsed_request: ParsedRequest, speech: SpeechTokens, audio: Audio, request_id: str, rank: int
) -> str:
    """The code of the likeliest of the languages' tokens behind the start: a request of its own, of one token. HttpError."""
    step = Step(f"{request_id}-language")
    codes = {token: code for code, token in speech.languages.items()}
    one = parsed_request.with_answer(logprobs=0).with_mesh(
        prompts=[MediaPrompt(TokenPrompt(pack_i32([speech.start])), (audio,))],
        sampling=SamplingParams(temperature=0.0, logprobs=0, allowed_token_ids=tuple(codes)),
        seed=0,
        text=TextParams(),
        max_tokens=1,
    )
    await step.take(backend, one, rank)
    return codes[step.found[0].token.token_id]
