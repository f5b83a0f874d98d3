"""POST /pooling with `data`: an I/O processor's plug-in makes prompts of it, and the answer of their vectors. Called by routes.py."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.responses import AnswerHead
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.frontend.requests.generation import Form
from meshlm.frontend.vectors.answers import VectorsResponse
from meshlm.frontend.vectors.reading import Asked
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime import io_processors
from meshlm.runtime.io_processors import IOProcessor, ProcessingError


class Processed:
    """One request on its way through the plug-in."""

    def __init__(self, processor: IOProcessor, asked: Asked) -> None:
        self._processor, self._asked = processor, asked
        self._answer: VectorsResponse | None = None
        self._data: Any = None

    def form(self) -> Form:
        return Form(self._whole, StreamResponse, before_end=self._post_process)

    def _whole(self, head: AnswerHead) -> VectorsResponse:
        self._answer = VectorsResponse(head, self._write)
        return self._answer

    async def _post_process(self) -> None:
        answer = self._answer
        assert answer is not None
        try:
            self._data = await asyncio.to_thread(
                io_processors.answer_of, self._processor, answer.vectors(), answer.request_id
            )
        except ProcessingError as error:
            raise HttpError.of_kind(ErrorKind.INTERNAL, str(error)) from None

    def _write(self, answer: VectorsResponse) -> bytes:
        try:
            return msgspec.json.encode(
                {"request_id": answer.request_id, "created_at": int(time.time()), "data": self._data}
            )
        except TypeError as error:
            text = f"the I/O processor {type(self._processor).__name__} gave what is no JSON: {error}"
            raise HttpError.of_kind(ErrorKind.INTERNAL, text) from None


def has_data(raw: bytes) -> bool:
    return bodies.fields_of(raw).get("data") is not None


def read(raw: bytes, processor: IOProcessor | None, read_vectors: Callable[[bytes], Asked]) -> tuple[Asked, Processed]:
    """The body as the plug-in has it; called in a thread. HttpError."""
    if processor is None:
        text = "data: the server was started without --io-processor-plugin; send input or messages"
        raise HttpError(400, text, "data")
    fields = msgspec.json.decode(raw, type=dict[str, Any])
    for name in ("input", "messages"):
        if fields.get(name) is not None:
            raise HttpError(400, f"{name}: not together with data", name)
    try:
        prompts = io_processors.prompts_of(processor, fields.pop("data"), str(fields.get("request_id") or ""))
    except ValueError as error:
        raise HttpError(400, f"data: {error}", "data") from None
    except ProcessingError as error:
        raise HttpError.of_kind(ErrorKind.INTERNAL, str(error)) from None
    for name in ("input", "messages", "softmax"):
        fields.pop(name, None)
    asked = read_vectors(msgspec.json.encode({**fields, "input": prompts}))
    return asked, Processed(processor, asked)
