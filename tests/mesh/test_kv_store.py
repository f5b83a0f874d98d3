"""A mesh with a store: it is one of the processes, may die at any moment, and is counted."""

import os
import signal

import httpx
import pytest
from fake_answers import complete, reference
from serving import Serving, serving
from waiting import until

pytestmark = pytest.mark.mesh
FLAGS = ("--device", "fake", "--max-model-len", "512", "--kv-offloading-size", "0.25")


def store(server: Serving) -> dict[str, object]:
    """Its row of `meshlm status`."""
    return next(row for row in server.status()["processes"] if row["role"] == "store")


def test_the_store_is_a_process_that_may_die() -> None:
    with serving(*FLAGS) as server:
        assert any("store/0 is ready: memory 0.25 GiB" in line for line in server.lines)
        before = server.pid("store")
        assert store(server)["state"] == "ready"
        os.kill(before, signal.SIGKILL)
        prompt = [300 + i for i in range(50)]
        assert complete(server, prompt, 20)["choices"][0]["token_ids"] == reference(prompt, 20)
        server.wait_for("store/0 is ready")
        until(lambda: store(server)["state"] == "ready" and server.pid("store") != before)
        assert store(server)["restarts"] == 1
        assert complete(server, prompt, 20)["choices"][0]["token_ids"] == reference(prompt, 20)
        until(lambda: "meshlm:kv_store_capacity_bytes{" in httpx.get(f"{server.url}/metrics").text)
