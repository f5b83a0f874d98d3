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


def error_object(message: str, kind: str, param: str, status: int) -> dict[str, dict[str, object]]:
    """{"error": {message, type, param, code}}."""
    return {"error": {"message": message, "type": kind, "param": param or None, "code": status}}
