"""Completions of token ids by a mesh with the fake device, and what it must answer."""

import json
from typing import Any

import httpx
from fake_oracle import expected_token
from serving import Serving

VOCAB = 49152


def reference(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(expected_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def complete(server: Serving, prompt: list[int], count: int, **extra: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "return_token_ids": True, **extra}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stream_ids(server: Serving, prompt: list[int], count: int) -> tuple[list[int], list[str]]:
    """Token ids and finish reasons of a streamed completion."""
    body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "return_token_ids": True, "stream": True}
    ids: list[int] = []
    reasons: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                ids += choice["token_ids"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return ids, reasons
