"""What the whole mesh refuses, and to whom: hosts, keys, bodies, paths."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_answers import reference, stream_ids
from http_clients import error_of
from serving import Serving, serving

pytestmark = pytest.mark.mesh


def test_without_a_key_only_this_host_is_served(fake: Serving) -> None:
    port = int(fake.url.rpartition(":")[2])
    (line,) = [line for line in fake.lines if "no API key is set" in line]
    assert "only this host is served" in line
    with socket.socket() as other:
        other.settimeout(10)
        assert other.connect_ex(("127.0.0.2", port)), "on another address nobody listens"


def test_api_key_guards_all_but_the_probes() -> None:
    """And one key learns nothing of what another one has asked, from how much of its prompt is cached."""
    with serving("--device", "fake", "--api-key", "secret", "other", "--admin-api-key", "root") as server:
        assert not any("no API key" in line for line in server.lines)
        asked = (httpx.post(f"{server.url}/start_profile", headers={"X-Api-Key": key}) for key in ("secret", "root"))
        assert [answer.status_code for answer in asked] == [403, 404], "404: no --profiler-dir"
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200

        def cached(key: str, **fields: object) -> int:
            body = {"prompt": list(range(300, 364)), "max_tokens": 1, **fields}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [cached("secret"), cached("other"), cached("other", cache_salt="mine")] == [0, 0, 0]
        assert [cached("secret"), cached("other"), cached("other", cache_salt="mine")] == [48, 48, 48]


BAD = [
    ('{"prompt": "x"', 400, ""),
    ("[]", 400, ""),
    ('{"prompt": "x", "temperature": -1}', 400, "temperature"),
    ('{"prompt": "x", "temperature": "warm"}', 400, "temperature"),
    ('{"prompt": "x", "top_p": 0}', 400, "top_p"),
    ('{"prompt": "x", "max_tokens": 0}', 400, "max_tokens"),
    ('{"prompt": "x", "max_tokens": 1000000}', 400, "max_tokens"),
    ('{"prompt": "x", "n": 100000}', 400, "n"),
    ('{"prompt": "x", "seed": 1e400}', 400, ""),
    ('{"prompt": ""}', 400, "prompt"),
    ('{"prompt": []}', 400, "prompt"),
    ('{"prompt": [99999999]}', 400, "prompt"),
    ('{"prompt": [-1]}', 400, "prompt"),
    ('{"prompt": [1, "a"]}', 400, "prompt"),
    ('{"prompt": "x", "model": "nope"}', 404, "model"),
    (json.dumps({"prompt": "x", "stop": ["s"] * 10_000}), 400, "stop"),
    ('{"prompt": "x", "logit_bias": {"a": 1}}', 400, "logit_bias"),
    ('{"prompt": "x", "logprobs": 1000}', 400, "logprobs"),
    ('{"prompt": "x", "best_of": 1, "n": 2}', 400, "best_of"),
    (json.dumps({"prompt": [5] * 5000}), 400, "prompt"),
    (b'{"prompt": "\xff\xfe"}', 400, ""),
]

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(("body", "status", "param"), BAD, ids=range(len(BAD)))
def test_bad_bodies_and_a_stream_beside_them(fake: Serving, body: str | bytes, status: int, param: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(stream_ids, fake, [400, 401], 60)
        answer = httpx.post(f"{fake.url}/v1/completions", content=body, headers=JSON, timeout=300)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["message"]
        assert (error["param"] or "") == param
        assert beside.result(timeout=300) == (reference([400, 401], 60), ["length"])


def test_bad_chats(fake: Serving) -> None:
    for messages in ([], [{"content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}], "hi"):
        answer = httpx.post(f"{fake.url}/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"
    refused = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 'mine' }}"}
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json=refused)
    assert answer.status_code == 400
    assert "--trust-request-chat-template" in answer.json()["error"]["message"]


def test_a_huge_body_is_refused(fake: Serving) -> None:
    answer = httpx.post(f"{fake.url}/v1/completions", content=b" " * 100_000_000, headers=JSON, timeout=300)
    assert answer.status_code == 413


def test_paths_and_methods_that_are_not_there(fake: Serving) -> None:
    missing = httpx.get(f"{fake.url}/v1/nothing")
    assert missing.status_code == 404
    assert error_of(missing)["type"] == "not_found_error"
    wrong = httpx.get(f"{fake.url}/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert "POST" in error_of(wrong)["message"]
