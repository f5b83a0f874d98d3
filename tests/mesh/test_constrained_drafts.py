"""Answers that keep to a grammar are the same with drafts and without, whichever process ends in the middle."""

import json
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from http_clients import metric
from serving import Serving, serving

pytestmark = pytest.mark.mesh
FLAGS = ("--device", "fake", "--max-model-len", "2048", "--reasoning-parser", "deepseek_r1")
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 4, "maxItems": 9}},
    "required": ["a"], "additionalProperties": False,
}  # fmt: skip
LONG = "([a-z]{3,9} ){160}[0-9]"
CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}}, r"\{.*\}"),
    ({"guided_regex": "[a-f]{4}(-[0-9]{2}){5}"}, "[a-f]{4}(-[0-9]{2}){5}"),
    ({"guided_choice": ["yes, indeed", "no", "yes and no"]}, "yes, indeed|no|yes and no"),
    ({"guided_grammar": 'root ::= item ("," item)* "."\nitem ::= [a-z]{3,5} "=" [0-9]+'}, r"([a-z]{3,5}=\d+,)*[a-z]{3,5}=\d+\."),
]  # fmt: skip


def streamed(server: Serving, ask: dict[str, Any], seed: int, begun: Callable[[], None]) -> tuple[str, str]:
    """The reasoning and the text of an answer; `begun` is called when some of the text is there."""
    body = {"messages": [{"role": "user", "content": f"Say {seed}"}], "max_tokens": 1500, "stream": True, **ask}
    reasoning, text = "", ""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                reasoning += choice["delta"].get("reasoning_content") or choice["delta"].get("reasoning") or ""
                if not text and choice["delta"].get("content"):
                    begun()
                text += choice["delta"].get("content") or ""
    return reasoning, text


def answers(server: Serving) -> list[tuple[str, str]]:
    """To each of the constraints several times, all at once; the budgets of their reasoning end within drafts or between them."""
    asks = [{**ask, "thinking_token_budget": 3 + nth} for ask, _ in CONSTRAINTS for nth in range(4)]
    with ThreadPoolExecutor(len(asks)) as threads:
        return list(threads.map(lambda ask: streamed(server, ask, ask["thinking_token_budget"], lambda: None), asks))


def processes_of_masks(server: Serving) -> list[psutil.Process]:
    (fork_server,) = psutil.Process(server.pid("worker")).children()
    found: list[psutil.Process] = fork_server.children()
    return found


def test_answers_are_the_same_with_drafts() -> None:
    long = {"guided_regex": LONG, "thinking_token_budget": 7}
    with serving(*FLAGS) as server:
        expected = answers(server)
        expected_long = [streamed(server, long, seed, lambda: None) for seed in range(2)]
    forms = [form for _, form in CONSTRAINTS for _ in range(4)]
    assert all(re.fullmatch(form, text, re.DOTALL) for form, (_, text) in zip(forms, expected, strict=True))
    assert all(reasoning for reasoning, _ in expected)
    with serving(*FLAGS, "--fake-drafts", "3", "--fake-step-ms", "8") as server:
        assert answers(server) == expected
        with httpx.Client(base_url=server.url) as client:
            drafted, accepted = (
                metric(client, f"spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted")
            )
        assert 0 < accepted < drafted
        killed = processes_of_masks(server)

        def kill_masks() -> None:
            for process in killed:
                process.kill()

        assert streamed(server, long, 0, kill_masks) == expected_long[0]
        assert killed
        assert processes_of_masks(server) not in ([], killed), "it was needed again"
        worker = server.pid("worker")
        assert streamed(server, long, 1, lambda: os.kill(worker, signal.SIGKILL)) == expected_long[1]
        assert server.pid("worker") != worker
