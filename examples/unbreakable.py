"""A stream that goes on whatever dies: kill -9 any process of the mesh while it runs (`meshlm status` shows their ids).

    python examples/unbreakable.py "Once upon a time" [--url http://127.0.0.1:8000]

All processes but the frontend die behind the connection, which only pauses. When the frontend dies the connection breaks: the same
request, with its Idempotency-Key and the id of the last event that came, goes on behind that event (docs/retries.md).
"""

import argparse
import json
import time
import uuid
from collections.abc import Iterator

import httpx

ATTEMPTS = 20  # in a row without an event
PAUSE_S = 0.5


def text_of(url: str, body: dict[str, object]) -> Iterator[str]:
    """The pieces of a completion's text, each once. httpx.TransportError when nobody is there for too long."""
    key, last_id, failed = str(uuid.uuid4()), "", 0
    while True:
        headers = {"Idempotency-Key": key} | ({"Last-Event-ID": last_id} if last_id else {})
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60.0) as answer:
                answer.raise_for_status()
                event_id = ""
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("id: "):
                        event_id = line.removeprefix("id: ")
                    elif line.startswith("data: "):
                        last_id, failed = event_id, 0
                        yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        except httpx.TransportError:
            failed += 1
            if failed == ATTEMPTS:
                raise
            time.sleep(PAUSE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description="Complete a text, whatever dies.")
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=300)
    arguments = parser.parse_args()
    body = {"prompt": arguments.prompt, "max_tokens": arguments.max_tokens, "stream": True, "ignore_eos": True}
    for piece in text_of(arguments.url, body):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
