"""What HTTP clients meet: addresses, limits, time limits and the fields of answers."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from meshlm.protocol.config.structured_outputs import StructuredOutputsConfig

STORE_OFF = "off"  # of responses_store


class ServerConfig(Struct, frozen=True, kw_only=True):
    """The HTTP server: addresses, limits, time limits, and fields of answers."""

    host: Annotated[
        str,
        Meta(
            description="address to listen on; default: 127.0.0.1, or with API keys 0.0.0.0, which is all of this host's"
        ),
    ] = ""
    port: Annotated[int, Meta(ge=1, le=65535, description="port to listen on")] = 8000
    grpc: Annotated[
        bool,
        Meta(description="the port speaks gRPC (vllm.grpc.engine) in the place of HTTP; packages of the extra grpc"),
    ] = False
    api_key: Annotated[
        tuple[str, ...], Meta(description="clients must send one of these as Bearer token", extra={"repeat": True})
    ] = ()
    api_key_file: Annotated[
        str,
        Meta(
            description="file with more of them, one a line with its scopes (inference, admin), read again when it changes"
        ),
    ] = ""
    admin_api_key: Annotated[
        tuple[str, ...],
        Meta(
            description="keys for profiles and the routes of --server-dev-mode; those of --api-key are not for them then",
            extra={"repeat": True},
        ),
    ] = ()
    ssl_certfile: Annotated[str, Meta(description="certificate (PEM): the port speaks TLS")] = ""
    ssl_keyfile: Annotated[str, Meta(description="its private key (PEM), where it is not in the same file")] = ""
    ssl_ca_certs: Annotated[str, Meta(description="authorities (PEM) that sign the certificates of clients")] = ""
    ssl_cert_reqs: Annotated[
        int, Meta(ge=0, le=2, description="certificates of clients: 0 none, 1 checked where they come, 2 needed")
    ] = 0
    ssl_ciphers: Annotated[str, Meta(description="ciphers of TLS 1.2, as OpenSSL writes them")] = ""
    enable_ssl_refresh: Annotated[bool, Meta(description="read these files again when they change")] = False
    frontends: Annotated[
        int,
        Meta(ge=0, le=256, description="HTTP processes; 0: one for each rank, as far as there are 8 cores for each"),
    ] = 0
    detokenizers: Annotated[int, Meta(ge=0, le=256, description="text processes; 0: as many by the same rule")] = 0
    max_body_bytes: Annotated[int, Meta(ge=1024, description="larger bodies get 413", extra={"bytes": True})] = 32 << 20
    max_audio_bytes: Annotated[int, Meta(ge=1024, description="larger audio files get 413", extra={"bytes": True})] = (
        25 << 20
    )
    max_audio_seconds: Annotated[
        int, Meta(ge=1, le=86400, description="audio that are longer get 400, whatever few bytes their files have")
    ] = 600
    max_incoming_bytes: Annotated[
        int,
        Meta(ge=1024, description="bodies that a frontend is reading at once, beyond which 503", extra={"bytes": True}),
    ] = 256 << 20
    max_unsent_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="answers that a frontend's clients have not taken; beyond it, and a quarter for one, they are cut off",
            extra={"bytes": True},
        ),
    ] = 256 << 20
    http_header_timeout: Annotated[
        float, Meta(gt=0, description="seconds that a request's head may take to come; then 408")
    ] = 60.0
    http_body_timeout: Annotated[
        float, Meta(gt=0, description="seconds that a request's body may be silent before its end; then 408")
    ] = 60.0
    http_send_timeout: Annotated[
        float, Meta(gt=0, description="seconds in which a client must take some of its answer, or be cut off")
    ] = 60.0
    max_concurrent_requests: Annotated[
        int, Meta(ge=1, description="open requests per frontend beyond which it answers 503")
    ] = 8192
    stream_interval: Annotated[
        int, Meta(ge=1, description="tokens of a chunk of a stream; the first token and the end leave at once")
    ] = 1
    max_concurrent_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="bytes of open requests (prompts, times their choices) per frontend beyond which it answers 503",
            extra={"bytes": True},
        ),
    ] = 256 << 20
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"],
        Meta(
            description="what logprobs of answers are: the model's own, or after penalties, temperature and truncation; of each the "
            "logits themselves. Those of prompts are the model's own log-probabilities"
        ),
    ] = "raw_logprobs"
    max_logprobs: Annotated[int, Meta(ge=-1, description="largest logprobs / top_logprobs; -1: the vocabulary")] = 20
    return_tokens_as_token_ids: Annotated[
        bool, Meta(description="logprobs name tokens 'token_id:5', unless a request says otherwise")
    ] = False
    enable_force_include_usage: Annotated[bool, Meta(description="streams tell their usage, asked for or not")] = False
    enable_per_request_metrics: Annotated[
        bool,
        Meta(
            description="answers, and the last chunk of streams that tell their usage, tell their times, as `metrics`"
        ),
    ] = False
    fingerprint_mode: Annotated[
        Literal["full", "hash", "custom", "none"],
        Meta(description="what system_fingerprint of answers tells; hash: not how the model is divided"),
    ] = "full"
    fingerprint_value: Annotated[str, Meta(description="system_fingerprint with --fingerprint-mode custom")] = ""
    trust_request_chat_template: Annotated[
        bool, Meta(description="requests may bring a chat_template, which can keep a detokenizer busy for ever")
    ] = False
    enable_auto_tool_choice: Annotated[
        bool, Meta(description="the model may call a request's tools; needs --tool-call-parser")
    ] = False
    tool_call_parser: Annotated[
        str,
        Meta(
            description="how the model writes tool calls: hermes (Qwen's models too), mistral ... (docs/tool-calling.md)"
        ),
    ] = ""
    exclude_tools_when_tool_choice_none: Annotated[
        bool, Meta(description="the model is told of no tools where tool_choice is none")
    ] = False
    tool_parser_plugin: Annotated[str, Meta(description="Python file with more of them, in a dict TOOL_PARSERS")] = ""
    structured_outputs_config: Annotated[
        str,
        Meta(
            description="of response_format and structured_outputs, as JSON: backend (guidance), disable_any_whitespace, "
            "disable_additional_properties, enable_in_reasoning"
        ),
    ] = "{}"
    reasoning_parser: Annotated[
        str,
        Meta(
            description="tell the reasoning from the answer: deepseek_r1, qwen3 ..., or '<a>...</a>' between two texts"
        ),
    ] = ""
    reasoning_parser_plugin: Annotated[
        str, Meta(description="Python file with more of them, in a dict REASONING_PARSERS")
    ] = ""
    io_processor_plugin: Annotated[
        str, Meta(description="plug-in that reads POST /pooling's `data` and writes the answer's (docs/plugins.md)")
    ] = ""
    max_dashboards: Annotated[
        int,
        Meta(ge=0, le=1024, description="open dashboards per frontend beyond which it answers 503; 0: no /dashboard"),
    ] = 32
    api: Annotated[
        tuple[Literal["ollama"], ...],
        Meta(description="APIs that are served beside OpenAI's and Anthropic's: ollama (/api/chat and its like)"),
    ] = ()
    root_path: Annotated[
        str, Meta(description="path under which a proxy has this server, as /llm: requests may come with it or without")
    ] = ""
    disable_fastapi_docs: Annotated[bool, Meta(description="no /openapi.json, /docs and /redoc (vLLM's name)")] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, Meta(description="GET /tokenizer_info tells the tokenizer's configuration and chat template")
    ] = False
    enable_prompt_embeds: Annotated[
        bool, Meta(description="prompts may be vectors of the first layer (prompt_embeds), as saved by torch")
    ] = False
    server_dev_mode: Annotated[
        bool,
        Meta(description="POST /pause, /abort_requests and the like are there for every client (VLLM_SERVER_DEV_MODE)"),
    ] = False
    default_chat_template_kwargs: Annotated[
        str, Meta(description="JSON object for the chat template, under a request's chat_template_kwargs")
    ] = ""
    allowed_origins: (
        Annotated[
            tuple[str, ...],
            Meta(
                description="origins whose web pages may ask (CORS); default: with API keys all, without any none",
                extra={"json": True},
            ),
        ]
        | None
    ) = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="without API keys: other names of this host that clients may call it by, .example.com for all below, * for any",
            extra={"json": True},
        ),
    ] = ()
    allowed_methods: Annotated[tuple[str, ...], Meta(description="CORS methods", extra={"json": True})] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], Meta(description="CORS headers", extra={"json": True})] = ("*",)
    allow_credentials: Annotated[bool, Meta(description="CORS: cookies and the like")] = False
    retry_window: Annotated[
        float,
        Meta(ge=0, description="seconds that an answer with an Idempotency-Key waits for its client to come back"),
    ] = 60.0
    responses_store: Annotated[
        str, Meta(description="file for the responses of /v1/responses; default: one in the run directory; off: none")
    ] = ""
    responses_store_count: Annotated[
        int, Meta(ge=1, description="stored responses beyond which the one that is used least goes")
    ] = 4096
    responses_store_bytes: Annotated[
        int,
        Meta(ge=1 << 16, description="bytes of stored responses beyond which the same is done", extra={"bytes": True}),
    ] = 256 << 20
    record_requests: Annotated[
        str,
        Meta(
            description="folder for files of requests with their tokens, which `meshlm replay` computes again; prompts are in them"
        ),
    ] = ""
    record_requests_bytes: Annotated[
        int,
        Meta(
            ge=1 << 16,
            description="bytes of one frontend's files of requests, of which the oldest half goes",
            extra={"bytes": True},
        ),
    ] = 256 << 20
    disable_log_requests: Annotated[bool, Meta(description="no log line per request")] = False

    @property
    def has_api_keys(self) -> bool:
        """Whether a client needs a key. A certificate is none: a browser shows it whatever page asks."""
        return bool(self.api_key or self.api_key_file)

    @property
    def has_keys(self) -> bool:
        """Whether a client needs a key, or a certificate in its place."""
        return self.has_api_keys or (bool(self.ssl_certfile) and self.ssl_cert_reqs == 2)

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """The origins whose web pages may ask, `*` for all."""
        return (("*",) if self.has_api_keys else ()) if self.allowed_origins is None else self.allowed_origins

    @property
    def address(self) -> str:
        """The address that is listened on (docs/adr/0006-this-host-alone-without-a-key.md)."""
        return self.host or ("0.0.0.0" if self.has_keys else "127.0.0.1")

    @property
    def is_local(self) -> bool:
        """Whether this host alone can reach the port."""
        import ipaddress  # 3 ms, which frontends and the supervisor alone need

        try:
            return ipaddress.ip_address(self.address).is_loopback
        except ValueError:
            return self.address == "localhost"

    @property
    def structured_outputs(self) -> StructuredOutputsConfig:
        """`structured_outputs_config`, read. msgspec.DecodeError or ValidationError where it is not right."""
        return msgspec.json.decode(self.structured_outputs_config, type=StructuredOutputsConfig)
