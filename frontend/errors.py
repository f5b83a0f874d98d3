"""OpenAI's error form."""

import msgspec

from meshlm.protocol.ids import ErrorKind

STATUS = {
    ErrorKind.INVALID: 400,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.OVERLOADED: 503,
    ErrorKind.TIMEOUT: 504,
    ErrorKind.INTERNAL: 500,
    ErrorKind.CONFLICT: 422,
}
RETRY_AFTER_S = 1


class HttpError(Exception):
    """Ends one HTTP request with a status and OpenAI's error body."""

    def __init__(self, status: int, message: str, param: str = "", kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.kind = status, message, param, kind

    @classmethod
    def of(cls, kind: ErrorKind, message: str, param: str = "") -> "HttpError":
        return cls(STATUS[kind], message, param, kind.value)

    def body(self) -> bytes:
        return msgspec.json.encode(error_object(self.message, self.kind, self.param, self.status))

    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status == 503 else {}


_GENERATION = "generation is the only task"
_LORA = "LoRA adapters are not supported"
_SLEEP = "there is no sleep mode"
# Paths that vLLM has: why they are not here, or what there is instead.
NOT_SERVED = {
    **dict.fromkeys(("/v1/responses", "/v1/messages"), "not supported; POST /v1/chat/completions is what there is"),
    **dict.fromkeys(("/invocations", "/inference/v1/generate"), "not supported; the other POST paths are"),
    **dict.fromkeys(
        ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
        _GENERATION,
    ),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), "only text is supported"),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _LORA),
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), _SLEEP),
    "/reset_prefix_cache": "not supported; a request's cache_salt keeps it from what others left there",
    **dict.fromkeys(("/docs", "/redoc", "/openapi.json"), "the server was started with --disable-fastapi-docs"),
}


def error_object(message: str, kind: str, param: str, status: int) -> dict[str, dict[str, object]]:
    """{"error": {message, type, param, code}}."""
    return {"error": {"message": message, "type": kind, "param": param or None, "code": status}}
