"""Two meshes, of which one computes prompts and the other decodes, by themselves and behind examples/prefill_decode_proxy.py."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_answers import complete, reference
from serving import Serving, serving
from waiting import free_ports, until

pytestmark = pytest.mark.mesh
PROXY = Path(__file__).parents[2] / "examples" / "prefill_decode_proxy.py"
FLAGS = ("--device", "fake", "--max-model-len", "1024", "--enable-prompt-tokens-details")
LEAVES: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}


def prompt(number: int) -> list[int]:
    return [100 * number + at for at in range(70)]


@contextmanager
def mesh(connector: str, role: str, port: int, *flags: str, **extra: Any) -> Iterator[Serving]:
    config = {"kv_connector": connector, "kv_role": role, "kv_port": port, "kv_connector_extra_config": extra}
    with serving(*FLAGS, *flags, "--kv-transfer-config", json.dumps(config)) as server:
        yield server


def counted(server: Serving, name: str) -> float:
    found = re.findall(
        rf"^meshlm:{name}(?:_total)?\{{.*\}} (\S+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE
    )
    return sum(map(float, found))


@pytest.fixture(scope="module")
def meshes() -> Iterator[tuple[Serving, Serving]]:
    with mesh("NixlConnector", "kv_producer", 0) as p, mesh("NixlConnector", "kv_consumer", 0) as d:
        yield p, d


def left_by(p: Serving, number: int) -> dict[str, Any]:
    answer = complete(p, prompt(number), 1, kv_transfer_params=LEAVES)
    found: dict[str, Any] = answer["kv_transfer_params"]
    return found


def decoded(d: Serving, number: int, params: dict[str, Any]) -> int:
    """The tokens are those of one mesh alone; how many of the prompt's were not computed."""
    answer = complete(d, prompt(number), 20, kv_transfer_params=params)
    assert answer["choices"][0]["token_ids"] == reference(prompt(number), 20)
    cached: int = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return cached


def test_a_prompt_of_the_one_mesh_is_decoded_by_the_other(meshes: tuple[Serving, Serving]) -> None:
    p, d = meshes
    params = left_by(p, 1)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert decoded(d, 1, params) == 64
    assert counted(d, "kv_loaded_blocks") == 4


def test_what_is_not_there_any_more_is_computed(meshes: tuple[Serving, Serving]) -> None:
    p, d = meshes
    params = left_by(p, 2)
    assert decoded(d, 2, {**params, "ticket": "00" * 32}) == 0
    assert decoded(d, 3, {**params, "remote_ports": [free_ports(1, "127.0.0.1")]}) == 0
    assert decoded(d, 4, params) == 0  # another prompt's ticket
    assert d.process.poll() is None


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_either_side_may_die(meshes: tuple[Serving, Serving], role: str) -> None:
    p, d = meshes
    number = 5 if role == "scheduler" else 6
    params = left_by(p, number)
    p.forget()
    os.kill(p.pid(role), signal.SIGKILL)
    decoded(d, number, params)  # it computes what it does not find
    p.wait_for(f"{role}/0 is ready")
    params = left_by(p, number + 2)
    d.forget()
    os.kill(d.pid(role), signal.SIGKILL)
    d.wait_for(f"{role}/0 is ready")
    assert decoded(d, number + 2, params) == 64


def test_what_params_cannot_be_is_refused(meshes: tuple[Serving, Serving]) -> None:
    _, d = meshes
    where = {"remote_engine_id": "e", "remote_host": "192.0.2.1", "remote_port": 80, "ticket": "00" * 32}
    for more in ({}, where):
        body = {"prompt": prompt(1), "kv_transfer_params": {"do_remote_prefill": True, **more}}
        answer = httpx.post(f"{d.url}/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")


@contextmanager
def proxy(*flags: str) -> Iterator[str]:
    """Its address, once it answers."""
    port = free_ports(1, "127.0.0.1")
    command = [sys.executable, "-P", str(PROXY), "--port", str(port), *flags]
    with subprocess.Popen(command) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: _answers(url))
            yield url
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/meshes").status_code == 200
    except httpx.HTTPError:
        return False


def through(url: str, number: int, **extra: Any) -> list[int]:
    body = {"prompt": prompt(number), "max_tokens": 20, "ignore_eos": True, "return_token_ids": True, **extra}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    if not extra.get("stream"):
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


def test_a_proxy_passes_params_on(meshes: tuple[Serving, Serving]) -> None:
    p, d = meshes
    before = counted(d, "kv_loaded_blocks")
    with proxy("--prefill", p.url, "--decode", d.url) as url:
        assert through(url, 10) == through(url, 10, stream=True) == reference(prompt(10), 20)
    assert counted(d, "kv_loaded_blocks") == before + 4
    with proxy("--prefill", "http://127.0.0.1:9", "--decode", d.url) as url:
        assert through(url, 11) == reference(prompt(11), 20)


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_meshes_that_ping_and_requests_whose_id_says_where(send_type: str) -> None:
    pings, first = free_ports(1, "127.0.0.1"), free_ports(4, "127.0.0.1")
    extra = {"proxy_ip": "127.0.0.1", "proxy_port": pings, "send_type": send_type}
    with (
        proxy("--pings", str(pings)) as url,
        mesh("P2pNcclConnector", "kv_producer", first, "--port", str(first + 1), **extra, http_port=first + 1),
        mesh("P2pNcclConnector", "kv_consumer", first + 2, "--port", str(first + 3), **extra, http_port=first + 3) as d,
    ):
        d.port = first + 3
        until(lambda: all(httpx.get(f"{url}/meshes").json().values()))
        assert through(url, 20) == through(url, 20, stream=True) == reference(prompt(20), 20)
        assert counted(d, "kv_loaded_blocks") == 4
