"""The same seeded request gives the same tokens and log-probabilities, to the last digit, whatever happens beside it and to it."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from http_clients import metric
from serving import Serving, serving
from waiting import until

pytestmark = [pytest.mark.mesh, pytest.mark.model]
PROMPT = " ".join(["one two three four five six seven eight nine ten"] * 6)
DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
FLAGS = (
    "--device",
    "cpu",
    "--cpu-threads",
    "1",
    "--deterministic",
    "--kv-cache-memory",
    "256M",
    "--max-model-len",
    "1024",
    *DRAFTS,
)


@pytest.fixture(scope="module")
def small_steps() -> Iterator[Serving]:
    with serving(*FLAGS, "--max-num-seqs", "16", "--max-num-batched-tokens", "24") as server:
        yield server


def ask(server: Serving, number: int = 0, **fields: Any) -> dict[str, Any]:
    """One answer; number 0 is the request that is compared."""
    of_number = {"prompt": f"{number} {PROMPT}"[2 * (not number) :], "seed": 7 + number, "temperature": 0.9 + number}
    body = {**of_number, "max_tokens": 40, "ignore_eos": True, "logprobs": 3, "return_token_ids": True, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return {name: found[name] for name in ("token_ids", "logprobs", "text")}


def test_nothing_changes_a_bit(small_steps: Serving) -> None:
    """Cold and warm, alone and beside others, in one step and in chunks, drafted and not, and with a worker that dies on the way."""
    server = small_steps
    assert any(", deterministic" in line for line in server.lines)
    cold = ask(server, deterministic=True, num_speculative_tokens=0)
    assert len(cold["token_ids"]) == 40
    assert ask(server, num_speculative_tokens=0) == cold, "behind a cached prefix"
    assert ask(server, cache_salt="another", num_speculative_tokens=3) == cold, "with drafts"
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, server, number) for number in range(1, 8)]
        assert ask(server, cache_salt="beside") == cold, "beside others"
        assert all(other.result() for other in others)
        asked = pool.submit(ask, server, cache_salt="killed", max_tokens=120)
        with httpx.Client(base_url=server.url) as client:
            until(lambda: metric(client, "num_requests_running") > 0)
        os.kill(server.pid("worker"), signal.SIGKILL)
        killed = asked.result()
    server.wait_for("worker/0 died and is started again")
    assert killed["token_ids"][:40] == cold["token_ids"], "with a worker that died"
    assert killed["logprobs"]["top_logprobs"][:40] == cold["logprobs"]["top_logprobs"]
    assert ask(server, max_tokens=120) == killed, "undisturbed"
    with serving(*FLAGS[:-2], "--max-num-batched-tokens", "512") as whole:
        assert ask(whole) == cold, "another server: the prompt in one step, without drafts"


def test_a_server_without_the_flag_refuses_the_field(fake: Serving) -> None:
    """On each path that takes it; null and false ask for nothing."""
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    bodies = {
        "completions": {"prompt": [5], "max_tokens": 2},
        "chat/completions": chat,
        "messages": {"model": fake_model(fake), **chat},
        "responses": {"input": "a", "max_output_tokens": 2},
    }
    for path, body in bodies.items():
        for wanted, status in ((True, 400), (False, 200), (None, 200)):
            answer = httpx.post(f"{fake.url}/v1/{path}", json={**body, "deterministic": wanted}, timeout=300)
            assert answer.status_code == status, (path, wanted, answer.text)
            if wanted:
                assert (
                    "deterministic: the server was started without --deterministic" in answer.json()["error"]["message"]
                )


def fake_model(server: Serving) -> str:
    name: str = httpx.get(f"{server.url}/v1/models", timeout=300).json()["data"][0]["id"]
    return name
