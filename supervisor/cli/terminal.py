"""`meshlm chat` and `meshlm complete`: talk to a running server from the terminal, with the standard library's HTTP client."""

import argparse
import contextlib
import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from meshlm.supervisor.errors import StartError, UsageError
from meshlm.supervisor.settings import vllm_env

Json = dict[str, Any]
Response = http.client.HTTPResponse
API_KEYS = (*vllm_env.API_KEYS, "OPENAI_API_KEY")  # the first that is set


class Server(NamedTuple):
    is_tls: bool
    host: str
    port: int
    base: str  # what stands before /chat/completions
    key: str

    @classmethod
    def of(cls, url: str, key: str) -> "Server":
        """ValueError for what is no address."""
        found = urlsplit(url)
        if found.scheme not in ("http", "https") or not found.hostname or found.query or not found.path.isascii():
            raise ValueError("must be like http://localhost:8000")
        is_tls = found.scheme == "https"
        return cls(is_tls, found.hostname, found.port or (443 if is_tls else 80), found.path.rstrip("/"), key)

    @contextlib.contextmanager
    def exchange(
        self, method: str, path: str, body: bytes | None, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Iterator[Response]:
        """The answer, whatever its status is. OSError and HTTPException when there is none."""
        kind = http.client.HTTPSConnection if self.is_tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=timeout_s)
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            sent = {"Content-Type": "application/json", **key, **(headers or {})}
            connection.request(method, self.base + path, body, sent)
            yield connection.getresponse()
        finally:
            connection.close()

    @contextlib.contextmanager
    def request(self, method: str, path: str, body: Json | None = None, timeout_s: float = 600) -> Iterator[Response]:
        """The answer, whose status is 200. StartError, for what goes wrong while it is read too."""
        try:
            data = None if body is None else json.dumps(body).encode()
            with self.exchange(method, path, data, timeout_s) as response:
                if response.status != 200:
                    raise StartError(_error_text(response.read()) or f"{self}: HTTP {response.status}")
                yield response
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:  # or no OpenAI's
            raise StartError(f"no answer from {self}{path}: {str(error) or type(error).__name__}") from None

    def __str__(self) -> str:
        return f"http{'s' * self.is_tls}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}{self.base}"


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="of the server, instead of --host and --port: http://localhost:8000/v1")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", help="default: " + ", ".join(API_KEYS))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `meshlm chat` and `meshlm complete`."""
    add_server(parser)
    parser.add_argument("--model-name", help="default: the server's first")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--stats", action="store_true", help="time to first token and tokens per second of each answer")


def server_of(arguments: argparse.Namespace) -> Server:
    """UsageError for what is no address."""
    environment = (os.environ.get(name) for name in API_KEYS)
    key = arguments.api_key or next(filter(None, environment), "")
    if arguments.url is None:
        return Server(False, arguments.host, arguments.port, "/v1", key)
    try:
        if " " in urlsplit(arguments.url).path:
            raise ValueError
        return Server.of(arguments.url, key)
    except ValueError:
        raise UsageError(f"--url {arguments.url}: must be like http://localhost:8000/v1") from None


def model_of(server: Server, arguments: argparse.Namespace) -> str:
    """--model-name, or the server's first."""
    if arguments.model_name:
        return str(arguments.model_name)
    with server.request("GET", "/models") as response:
        return str(json.loads(response.read())["data"][0]["id"])


def prompts(once: str | None) -> Iterator[str]:
    """The prompts: the given one, or one line after the other until an empty one."""
    if once:
        yield once
        return
    print("Empty line or Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            text = input("> ")
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise UsageError(f"what is typed must be UTF-8: {error.reason}") from None
        if not text.strip():
            return
        yield text


def show(
    server: Server, path: str, body: Json, arguments: argparse.Namespace, text_of: Callable[[Json], object]
) -> str:
    """Ask, print the text of each choice as it comes, and give all of it."""
    body = {**body, "stream": True}
    for field in ("temperature", "max_tokens"):
        if getattr(arguments, field) is not None:
            body[field] = getattr(arguments, field)
    if arguments.stats:
        body["stream_options"] = {"include_usage": True}
    begun, first, num_tokens, answer = time.perf_counter(), 0.0, 0, ""
    for event in _events(server, path, body):
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        for choice in event.get("choices") or []:
            piece = str(text_of(choice) or "")
            if piece and not first:
                first = time.perf_counter()
            answer += piece
            print(piece, end="", flush=True)
    print()
    if arguments.stats and first:
        took = time.perf_counter() - begun
        print(f"TTFT: {(first - begun) * 1e3:.2f} ms")
        print(f"TPS:  {num_tokens / took:.2f} tokens/s ({num_tokens} tokens in {took:.2f}s)")
    return answer


def _events(server: Server, path: str, body: Json) -> Iterator[Json]:
    with server.request("POST", path, body) as response:
        for line in response:
            data = line.decode().removeprefix("data:").strip()
            if not data or data == "[DONE]" or not line.startswith(b"data:"):
                continue
            event = json.loads(data)
            if "error" in event:
                raise StartError(_error_text(data.encode()) or "the server gave up")
            yield event


def _error_text(body: bytes) -> str:
    try:
        found = json.loads(body)["error"]
        return " ".join(str(found["message"] if isinstance(found, dict) else found).split())
    except (ValueError, KeyError, TypeError):
        return " ".join(body.decode(errors="replace").split())[:500]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    chat = commands.add_parser("chat", help="talk to a running server")
    add_flags(chat)
    chat.add_argument("--system-prompt", "--system", help="system prompt")
    chat.add_argument("-q", "--quick", "--question", metavar="MESSAGE", help="ask this once and end")
    chat.set_defaults(run=run_chat)

    complete = commands.add_parser("complete", help="complete texts with a running server")
    add_flags(complete)
    complete.add_argument("-q", "--quick", metavar="PROMPT", help="complete this once and end")
    complete.set_defaults(run=run_complete)


def run_chat(arguments: argparse.Namespace) -> int:
    server = server_of(arguments)
    model = model_of(server, arguments)
    system = arguments.system_prompt
    history: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for text in prompts(arguments.quick):
        history.append({"role": "user", "content": text})
        body = {"model": model, "messages": history}
        show_delta = partial(show, text_of=lambda choice: (choice.get("delta") or {}).get("content"))
        history.append({"role": "assistant", "content": show_delta(server, "/chat/completions", body, arguments)})
    return 0


def run_complete(arguments: argparse.Namespace) -> int:
    server = server_of(arguments)
    model = model_of(server, arguments)
    for text in prompts(arguments.quick):
        body = {"model": model, "prompt": text}
        show(server, "/completions", body, arguments, lambda choice: choice.get("text"))
    return 0
