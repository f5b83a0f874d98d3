"""Refusals: OpenAI's error form, Anthropic's and Ollama's for the paths of their APIs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from msgspec import Struct

from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError

STATUS = {
    ErrorKind.INVALID: 400,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.OVERLOADED: 503,
    ErrorKind.TIMEOUT: 504,
    ErrorKind.INTERNAL: 500,
    ErrorKind.POISON: 400,
    ErrorKind.CONFLICT: 422,
}
RETRY_AFTER_S = 1
MAX_MESSAGE = 2000
# The kind of an error by its status, where nobody says another.
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    **{
        STATUS[kind]: kind.value
        for kind in ErrorKind
        if kind.name in ("NOT_FOUND", "OVERLOADED", "TIMEOUT", "INTERNAL")
    },
}
LIMITS = (
    *("max-waiting", "max-concurrent-requests", "max-concurrent-bytes", "max-incoming-bytes", "max-body-bytes"),
    *("max-audio-bytes", "max-num-seqs", "drain-timeout"),
)
REASONS = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    408: "slow_body",
    409: "conflict",
    413: "too_large",
    422: "conflict",
    429: "rate_limit",
    503: "not_ready",
}


class ErrorInfo(Struct):
    """`param` names the field or header at fault, `code` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(Struct):
    """The body of every refusal."""

    error: ErrorInfo


class HttpError(Exception):
    """Ends one HTTP request with a status and OpenAI's error body."""

    def __init__(
        self, status: int, message: str, param: str = "", kind: str = "", retry_after_s: int = RETRY_AFTER_S
    ) -> None:
        if len(message) > MAX_MESSAGE:  # it may quote what the client sent
            message = message[:MAX_MESSAGE] + "..."
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.kind = kind or KINDS.get(status, ErrorKind.INVALID.value)
        self._retry_after_s = retry_after_s

    @classmethod
    def of_kind(cls, kind: ErrorKind, message: str, param: str = "") -> "HttpError":
        return cls(STATUS[kind], message, param, kind.value)

    def reason(self) -> str:
        """Why the request was refused, for /metrics: the flag that limits it, or what its status means; "" where it is no refusal."""
        if self.status in (413, 429, 503):
            for flag in LIMITS:
                if f"--{flag}" in self.message:
                    return flag.replace("-", "_")
        return REASONS.get(self.status, "" if self.status >= 500 else "invalid")

    def body(self, path: str = "") -> bytes:
        """The body of the answer, in the form of the API that `path` belongs to."""
        if is_anthropic(path):
            return msgspec.json.encode(anthropic_error(self.message, self.status))
        if path.startswith(OLLAMA):
            return msgspec.json.encode({"error": self.message})
        return msgspec.json.encode(self.response())

    def response(self) -> ErrorResponse:
        return ErrorResponse(ErrorInfo(self.message, self.kind, self.param or None, self.status))

    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self._retry_after_s)} if self.status in (429, 503) else {}


@contextmanager
def as_http() -> Iterator[None]:
    """A RequestError of this block becomes the HttpError of its kind."""
    try:
        yield
    except RequestError as error:
        raise HttpError.of_kind(error.kind, error.message, error.param) from None


def field_error(where: str, text: str) -> HttpError:
    """What is wrong in a field of the body: `where` is its name, with the path in it if there is one (`tools[3].name`)."""
    return HttpError(400, f"{where}: {text}", re.split(r"[.\[]", where, maxsplit=1)[0])


_TEXT = "this server gives text; --runner pooling serves vectors"
_VECTORS = (
    "this server takes no texts to go on with: it gives vectors (--runner), transcribes audio (/v1/audio/transcriptions), or was "
    "started by meshlm launch render"
)
NO_AUDIO = "this server's model takes texts, and transcribes no audio (as Whisper does)"
# Paths that vLLM has, by why they are not here, or what there is instead.
_PATHS_NOT_SERVED = {
    _TEXT: "/v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank",
    _VECTORS: "/v1/completions /v1/chat/completions /v1/messages /v1/messages/count_tokens /v1/responses /v1/conversations "
    "/v1/completions/render /v1/completions/derender /v1/chat/completions/render /v1/chat/completions/derender "
    "/v1/chat/completions/batch /inference/v1/generate /generative_scoring",
    NO_AUDIO: "/v1/audio/transcriptions /v1/audio/translations",
    "the server was started without --enable-lora, or without --allow-runtime-lora-updating": "/v1/load_lora_adapter "
    "/v1/unload_lora_adapter",
    "only text is supported": "/reset_mm_cache /reset_encoder_cache",
    "not supported; GET /ready says whether requests are served": "/readyz",
    "a drafter's weights are those of its files; POST /start_weight_update is for the model's": "/start_draft_weight_update",
    "weights come from a folder here (docs/rl.md): POST /update_weights_from_disk": "/init_communicator "
    "/init_communicator/ /update_named_param /update_named_param/ /batch_update_named_params /batch_update_named_params/ "
    "/close_communicator /close_communicator/ /init_weights_update_group /update_weights_from_distributed "
    "/update_weights_from_tensor /update_weights_from_ipc /weights_checker",
    "the server was started without --enable-tokenizer-info-endpoint": "/tokenizer_info",
    "the server was started without --server-dev-mode": "/reset_prefix_cache /rebalance_experts /server_info /pause /resume "
    "/is_paused /sleep /wake_up /collective_rpc /is_sleeping /get_world_size /abort_requests /scale_elastic_ep "
    "/is_scaling_elastic_ep /init_weight_transfer_engine /start_weight_update /update_weights /finish_weight_update "
    "/update_weights_from_disk /update_weight_version /weight_info /weight_checker",
    "the server was started without --api ollama": "/api/chat /api/generate /api/embed /api/embeddings /api/tags /api/show /api/ps "
    "/api/version /api/pull",
    "the server has the models that it was started with, and makes none": "/api/create /api/copy /api/delete /api/push",
    "the server was started with --max-dashboards 0": "/dashboard /dashboard/events",
    "the server was started with --disable-fastapi-docs": "/docs /redoc /openapi.json",
}
NOT_SERVED = {path: why for why, paths in _PATHS_NOT_SERVED.items() for path in paths.split()}
ANTHROPIC, OLLAMA = "/v1/messages", "/api/"
_ANTHROPIC_KINDS = {**KINDS, 413: "request_too_large", 500: "api_error"}


def is_anthropic(path: str) -> bool:
    return path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")


def anthropic_error(message: str, status: int) -> dict[str, object]:
    """{"type": "error", "error": {type, message}}."""
    kind = _ANTHROPIC_KINDS.get(status, ErrorKind.INVALID.value)
    return {"type": "error", "error": {"type": kind, "message": message}}
