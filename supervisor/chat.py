"""`meshlm chat`: talk to a running server from the terminal, with nothing but the standard library's HTTP client."""

import argparse
import http.client
import json
import os
import sys
from collections.abc import Iterator

from meshlm.supervisor.errors import StartError

Message = dict[str, str]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("chat", help="talk to a running server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", default=os.environ.get("MESHLM_API_KEY", ""))
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("-q", "--question", help="ask this once and end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    history: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    if arguments.question:
        ask(arguments, history, arguments.question)
        return 0
    print("Empty line or Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            text = input("> ")
        except EOFError:
            return 0
        if not text.strip():
            return 0
        ask(arguments, history, text)


def ask(arguments: argparse.Namespace, history: list[Message], text: str) -> None:
    """Send the conversation with one more question, print the answer as it comes, remember both."""
    history.append({"role": "user", "content": text})
    body: dict[str, object] = {"messages": history, "stream": True}
    for field in ("temperature", "max_tokens"):
        if getattr(arguments, field) is not None:
            body[field] = getattr(arguments, field)
    answer = ""
    for piece in _stream(arguments, body):
        answer += piece
        print(piece, end="", flush=True)
    print()
    history.append({"role": "assistant", "content": answer})


def _stream(arguments: argparse.Namespace, body: dict[str, object]) -> Iterator[str]:
    headers = {"Content-Type": "application/json"}
    if arguments.api_key:
        headers["Authorization"] = f"Bearer {arguments.api_key}"
    connection = http.client.HTTPConnection(arguments.host, arguments.port, timeout=600)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise StartError(_error_text(response.read()))
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise StartError(event["error"].get("message", "the server gave up"))
            for choice in event.get("choices", []):
                yield choice.get("delta", {}).get("content") or ""
    except (OSError, http.client.HTTPException) as error:  # the latter when an answer breaks off
        raise StartError(f"no answer from {arguments.host}:{arguments.port}: {error}") from None
    finally:
        connection.close()


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
