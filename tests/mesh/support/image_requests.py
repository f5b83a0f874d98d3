"""Requests with images to a mesh whose fake device sees them, and what it must answer: the items are those of the real processor, made
in this process in another way than the mesh makes them."""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from image_files import file_of, picture
from msgspec.structs import replace
from seeing_models import CONFIG, fake_answer
from serving import Serving

from meshlm.architectures.media import media_spec
from meshlm.mediaproc.images import decoded
from meshlm.mediaproc.processors import Processor
from meshlm.protocol.media import MediaItem, Modality

FLAGS = ("--load-format", "dummy", "--device", "fake", "--max-model-len", "2048", "--fake-step-ms", "20")
LIMIT_S = 300  # the processor's libraries load with the first image
seeds = itertools.count(1)


def processor_of(folder: Path) -> Processor:
    spec = media_spec(CONFIG, 32)
    assert spec is not None
    return Processor(str(folder), spec, {})


def part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def body(*content: Any, count: int = 6, **more: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    fields = {"max_tokens": count, "ignore_eos": True, "return_token_ids": True, **more}
    return {"messages": [{"role": "user", "content": parts}], **fields}


def ask(server: Serving, *content: Any, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=body(*content, **more), timeout=LIMIT_S)


def ids_of(answer: httpx.Response) -> tuple[list[int], list[int]]:
    assert answer.status_code == 200, answer.text
    found = answer.json()
    prompt = found["prompt_token_ids"] if found.get("prompt_token_ids") else found["choices"][0]["prompt_token_ids"]
    return prompt, found["choices"][0]["token_ids"]


def cached(answer: httpx.Response) -> int:
    number: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def placed(processor: Processor, prompt: list[int], *files: bytes) -> list[MediaItem]:
    """The items of these files in a prompt."""
    items, at = [], 0
    for data in files:
        item = processor.made(Modality.IMAGE, decoded(data, 1 << 30, (255, 255, 255)), {}).item
        first = next(place for place in range(at, len(prompt)) if prompt[place] == item.placeholder)
        items.append(_moved(item, first))
        at = first + item.num_tokens
    return items


def _moved(item: MediaItem, position: int) -> MediaItem:
    return replace(item, position=position)


def right(processor: Processor, answer: httpx.Response, *files: bytes, count: int = 6) -> None:
    """The answer is what these images make it."""
    prompt, ids = ids_of(answer)
    assert ids == fake_answer(prompt, placed(processor, prompt, *files), count)


def fresh(size: tuple[int, int] = (96, 64)) -> bytes:
    """An image that nobody has sent."""
    return file_of(picture(next(seeds), size))


def stream(server: Serving, asked: dict[str, Any], on_token: Any, headers: dict[str, str] | None = None) -> list[int]:
    ids: list[int] = []
    sent = {**asked, "stream": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=sent, timeout=LIMIT_S, headers=headers
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or ()
                    on_token(len(ids))
    return ids


class Host(BaseHTTPRequestHandler):
    """Images over http: /a.png is one, others behave badly."""

    def do_GET(self) -> None:
        assert isinstance(self.server, ThreadingHTTPServer)
        image = file_of(picture(88))
        match self.path:
            case "/moved.png":
                self.send_response(302)
                self.send_header("Location", "http://169.254.169.254/")
                self.end_headers()
            case "/missing.png":
                self.send_error(404)
            case "/endless.png":
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):
                    while True:
                        self.wfile.write(bytes(1 << 16))
            case "/slow.png":
                self.send_response(200)
                self.send_header("Content-Length", "100")
                self.end_headers()
                self.server.slow.wait(30)  # type: ignore[attr-defined]
            case _:
                self.send_response(200)
                self.send_header("Content-Length", str(len(image)))
                self.end_headers()
                self.wfile.write(image)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def image_host() -> Iterator[str]:
    """The URL of such a host on this one."""
    host = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    host.slow = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=host.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{host.server_port}"
    finally:
        host.slow.set()  # type: ignore[attr-defined]
        host.shutdown()
        host.server_close()
