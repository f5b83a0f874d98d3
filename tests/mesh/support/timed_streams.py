"""Streamed completions of a mesh with the fake device, with the time of each event."""

import json
import threading
import time

import httpx

NUM_TOKENS = 300


class Stream:
    """A streamed completion: its tokens, and when each event came. more: fields of its request."""

    def __init__(self, number: int, **more: object) -> None:
        self._more = more
        self.prompt = [800 + number] * (30 + number)
        self.ids: list[int] = []
        self.at: list[float] = []
        self.begun = threading.Event()  # some tokens are there

    def read(self, url: str) -> None:
        body = {"prompt": self.prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={**body, "stream": True, **self._more}, timeout=60
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.ids += json.loads(line[6:])["choices"][0]["token_ids"]
                    self.at.append(time.monotonic())
                    if len(self.ids) > 10:
                        self.begun.set()

    @property
    def longest_gap_s(self) -> float:
        return max(after - before for before, after in zip(self.at, self.at[1:], strict=False))
