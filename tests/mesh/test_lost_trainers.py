"""A trainer's process is killed in each phase of an update: the old weights serve, what it paused goes on, another one begins anew."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from changing_weights import post, three_models, versions
from senders import EXAMPLE, Refused, dev, example, sender, tensors
from serving import Serving, serving
from split_models import COUNT, PROMPTS, greedy
from waiting import free_port, until

pytestmark = pytest.mark.mesh
Models = tuple[list[str], list[list[list[int]]]]
TRAINER = Path(__file__).parent / "support" / "dying_trainer.py"
PATIENCE_S = 2.0
MORE = ("--trainer-timeout", str(PATIENCE_S))
LONG = 400


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return three_models(tmp_path_factory)


@contextlib.contextmanager
def trainer(server: Serving, backend: str, model: str, phase: str) -> Iterator["subprocess.Popen[str]"]:
    """Its process, which has come to this phase and stays there."""
    port = str(free_port())
    words = [sys.executable, str(TRAINER), str(EXAMPLE.parent), server.url, backend, port, model, phase]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"at {phase}\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        Path(f"/dev/shm/test-{port}").unlink(missing_ok=True)


class Running:
    """A request that runs, and is stopped by a pause."""

    def __init__(self, server: Serving) -> None:
        self.tokens: list[int] = []
        self._server, self._thread = server, threading.Thread(target=self._read)
        self._thread.start()
        until(lambda: len(self.tokens) > 0)
        answer = httpx.post(f"{server.url}/pause?mode=keep", timeout=60)
        assert answer.status_code == 200
        self.before = len(self.tokens)

    def _read(self) -> None:
        body = {"prompt": PROMPTS[0], "max_tokens": LONG, "ignore_eos": True, "temperature": 0, "stream": True}
        body["return_token_ids"] = True
        with httpx.stream("POST", f"{self._server.url}/v1/completions", json=body, timeout=300) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self.tokens += choice.get("token_ids") or []

    def finish(self) -> list[int]:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.tokens


def stopped(server: Serving) -> Running:
    """One that has not come to its end when the pause comes; those that were faster are let go."""
    for _ in range(30):
        if (running := Running(server)).before < LONG:
            return running
        post(server, "/resume")
        running.finish()
    raise AssertionError("every request was faster than the pause")


def is_idle(server: Serving) -> bool:
    stats: dict[str, Any] = httpx.get(f"{server.url}/weight_info", timeout=60).json()
    paused = httpx.get(f"{server.url}/is_paused", timeout=60).json()["is_paused"]
    return stats["updating"] is None and not paused


PHASES = {
    "gloo": ("meeting", "joined", "started", "sending", "half", "sent", "finished"),
    "ipc": ("joined", "started", "half", "sent", "finished"),
}


@pytest.mark.parametrize("backend", PHASES)
def test_killed_in_each_phase(models: Models, backend: str) -> None:
    (a, b, c), (first, second, third) = models
    now, others = (a, first), [(b, second), (c, third)]
    with serving(a, *dev(backend), *MORE) as server:
        for phase in PHASES[backend]:
            running, version = stopped(server), versions(server)[0]
            with trainer(server, backend, others[0][0], phase) as process:
                if phase == "sending":
                    until(lambda: "receiving" in str(httpx.get(f"{server.url}/weight_info", timeout=60).json()))
                process.kill()
                died = time.monotonic()
                until(lambda: is_idle(server), 60)
                took_s = time.monotonic() - died
                assert took_s < PATIENCE_S + 8, f"{phase}: {took_s:.1f} s"
            tokens = running.finish()
            assert len(tokens) == LONG
            shown = min(running.before, COUNT)
            assert tokens[:shown] == now[1][0][:shown], phase
            expected = (others[0][1], "dead") if phase == "finished" else (now[1], version)
            assert (greedy(server), versions(server)[0]) == expected, phase
            now, others = others[1], [others[0], now]
            with sender(backend, server.url) as sends:
                sends.send(tensors(now[0]).items(), f"next-{phase}")
            assert greedy(server) == now[1]


def test_two_at_once(models: Models) -> None:
    """The second one is told, and the first one's turn goes on; where the first one is gone it is over as soon as another one joins."""
    (a, b, c), (first, second, _) = models
    with serving(a, *dev("gloo"), "--trainer-timeout", "600") as server:
        with trainer(server, "gloo", c, "started") as other:
            with (
                pytest.raises(Refused, match="another trainer updates the weights, and is there"),
                sender("gloo", server.url),
            ):
                pass
            with (
                contextlib.closing(example.Mesh(server.url)) as mesh,
                pytest.raises(Refused, match="another trainer updates the weights since"),
            ):
                mesh.post("/start_weight_update", {})
            assert "another trainer" in str(post(server, "/update_weights_from_disk", {"model_path": b}, 409))
            other.kill()
            other.wait()
            with sender("gloo", server.url) as sends:
                post(server, "/resume")
                assert greedy(server) == first
                sends.send(tensors(b).items(), "taken-over")
        assert greedy(server) == second
