"""The lines of OpenAI's batch files: requests that come in, answers that go out, with vLLM's fields. Pure; used by run.py.

A line that is no request gets a line with its error, and the others run.
"""

import json
import uuid
from typing import Any, NamedTuple

Json = dict[str, Any]
# What a line may ask for. A path that the server lacks, since its model cannot do that, is the server's to refuse.
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v2/embed",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/pooling",
    "/classify",
)


class Request(NamedTuple):
    """One request of a batch."""

    custom_id: str
    path: str
    body: Json


class LineError(Exception):
    """A line is no request. `custom_id` is the one that could be read."""

    def __init__(self, message: str, custom_id: str = "") -> None:
        super().__init__(message)
        self.custom_id = custom_id


def read(line: bytes, number: int) -> Request:
    """The request of line `number`, counted from 1. LineError says what is wrong with it."""
    begin = f"line {number}: "
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        raise LineError(f"{begin}is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise LineError(f"{begin}must be an object with custom_id, method, url and body")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str):
        raise LineError(f"{begin}custom_id must be a text")
    if found.get("method") != "POST":
        raise LineError(f"{begin}method must be POST", custom_id)
    if found.get("url") not in PATHS:
        raise LineError(f"{begin}url {str(found.get('url'))[:100]!r} is none of {', '.join(PATHS)}", custom_id)
    if not isinstance(body := found.get("body"), dict):
        raise LineError(f"{begin}body must be an object", custom_id)
    if body.get("stream"):
        raise LineError(f"{begin}body.stream: a batch has whole answers", custom_id)
    return Request(custom_id, found["url"], body)


def answered(custom_id: str, status: int, body: Json) -> bytes:
    """The line of an answer, or of what the server says against the request."""
    if status == 200:
        return _line(custom_id, status, body, None)
    return _line(custom_id, status, None, body)


def failed(custom_id: str, status: int, message: str) -> bytes:
    """The line of a request that was not sent, or that no server answered."""
    kind = "invalid_request_error" if status == 400 else "internal_error"
    return _line(custom_id, status, None, {"error": {"message": message, "type": kind, "param": None, "code": status}})


def _line(custom_id: str, status: int, body: Json | None, error: Json | None) -> bytes:
    response = {"status_code": status, "request_id": f"batch-{uuid.uuid4().hex}", "body": body}
    whole = {"id": f"batch_req-{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(whole, ensure_ascii=False).encode(errors="replace") + b"\n"
