"""A supervisor is killed, with and without its standby, while streams run: their tokens are the undisturbed run's, and nobody stays."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from fake_answers import reference
from serving import MESHLM, Serving, serving
from timed_streams import NUM_TOKENS, Stream
from waiting import until

from meshlm.runtime.process import shared_memory
from meshlm.supervisor.errors import StartError
from meshlm.supervisor.processes import state_file

pytestmark = pytest.mark.mesh
FLAGS = ("--device", "fake", "--fake-step-ms", "20", "--max-model-len", "4096")
SPARES = ("--standby-roles", "detokenizer", "coordinator", "supervisor")


def spare(server: Serving) -> int:
    """The pid of the supervisor's standby; 0 while there is none."""
    found = (one for one in server.status()["standbys"] if one["role"] == "supervisor" and one["state"] == "standby")
    return next((int(one["pid"]) for one in found), 0)


def has_supervisor(server: Serving, other_than: int) -> bool:
    with contextlib.suppress(StartError):
        rows = server.status()["processes"]
        return rows[0]["pid"] != other_than and all(row["state"] == "ready" for row in rows)
    return False


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def streams(server: Serving, count: int = 6) -> Iterator[list[Stream]]:
    """Their tokens are the oracle's in the end."""
    found = [Stream(number) for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        reads = [pool.submit(one.read, server.url) for one in found]
        for one in found:
            assert one.begun.wait(30)
        yield found
        for read in reads:
            read.result(timeout=60)
    for one in found:
        assert one.ids == reference(one.prompt, NUM_TOKENS)


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def test_the_standby_follows_a_supervisor_that_is_killed() -> None:
    """Alone; together with a worker; and the next one too. What was added by hand stays, and the last one ends all in good order."""
    with serving(*FLAGS, *SPARES) as server:
        command = [MESHLM, "launch", "detokenizer", "--run-dir", server.run_dir]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/") as launched:
            try:
                until(lambda: bool(spare(server)))
                before = {p["role"]: p["pid"] for p in server.status()["processes"]}
                with streams(server) as running:
                    kill(first := server.pid("supervisor"))
                    until(lambda: has_supervisor(server, first))
                after = {p["role"]: p["pid"] for p in server.status()["processes"]}
                assert [role for role in before if after[role] != before[role]] == ["supervisor"], (
                    "all others are the same"
                )
                assert max(one.longest_gap_s for one in running) < 1.0, "tokens do not pass through it"
                until(lambda: bool(spare(server)))
                with streams(server):
                    kill(second := server.pid("supervisor"), server.pid("worker"))
                    until(lambda: has_supervisor(server, second))
                rows = {p["role"]: p for p in server.status()["processes"]}
                assert rows["worker"]["restarts"] == 1
                assert launched.poll() is None
                os.kill(last := server.pid("supervisor"), signal.SIGTERM)
                until(lambda: not runs(last), 30)
                assert launched.wait(timeout=20) == 1
                assert not any(runs(p["pid"]) for p in rows.values())
                assert list(Path(server.run_dir).iterdir()) == []
            finally:
                launched.kill()


def test_a_standby_that_is_killed_is_replaced_and_a_second_mesh_is_refused() -> None:
    with serving(*FLAGS, *SPARES) as server:
        until(lambda: bool(spare(server)))
        kill(old := spare(server))
        until(lambda: spare(server) not in (0, old))
        assert runs(server.pid("supervisor"))
        again = [
            MESHLM,
            "serve",
            *FLAGS,
            "--host",
            "127.0.0.1",
            "--port",
            str(server.port),
            "--run-dir",
            server.run_dir,
        ]
        refused = subprocess.run(again, capture_output=True, text=True, cwd="/", timeout=60)
        assert refused.returncode == 1
        assert "another mesh runs there" in refused.stderr
        assert httpx.get(f"{server.url}/health").status_code == 200


def kill_both(server: Serving) -> list[int]:
    """The supervisor and its standby at once; the others' pids."""
    until(lambda: bool(spare(server)))
    supervisor, *others = [p["pid"] for p in server.status()["processes"]]
    kill(spare(server), supervisor)
    until(lambda: not runs(supervisor))
    return others


def test_without_a_supervisor_all_serve_on_and_end_when_the_grace_is_over() -> None:
    """Those that are stopped too. Nothing is left: no process, port or file."""
    with serving(*FLAGS, "--orphan-grace", "3", "--drain-timeout", "1", *SPARES) as server:
        others = kill_both(server)
        assert httpx.get(f"{server.url}/health").status_code == 200, "they serve"
        outline = state_file.outline(Path(server.run_dir))
        assert outline is not None
        assert sorted(outline.alive) == sorted(others)
        os.kill(others[0], signal.SIGSTOP)
        until(lambda: not any(map(runs, others)), 30)
        until(lambda: not any(Path(server.run_dir).glob("*.sock")), 10)
        until(lambda: not any(Path(server.run_dir).glob("*.json")), 10)
        assert not shared_memory.folder_of(server.run_dir).exists()
        with socket.socket() as free:
            free.bind(("127.0.0.1", server.port))


def test_the_next_start_takes_over_what_is_left_where_its_flags_are_the_same() -> None:
    with serving(*FLAGS, "--standby-roles", "coordinator", "--orphan-grace", "60", "--api-key", "a") as server:
        until(lambda: bool(server.status()["standbys"]))  # seconds after all were told to outlive it
        server.process.kill()
        server.process.wait()
        own = ("--host", "127.0.0.1", "--port", str(server.port), "--run-dir", server.run_dir)
        same = ("--standby-roles", "coordinator", "--orphan-grace", "60", *own)
        for flags, other in (
            ((*FLAGS, "--max-num-seqs", "7", *same, "--api-key", "a"), "--max-num-seqs was "),
            ((*FLAGS, *same, "--api-key", "b"), "the API's keys"),
        ):
            refused = subprocess.run([MESHLM, "serve", *flags], capture_output=True, text=True, cwd="/", timeout=60)
            assert refused.returncode == 1
            (line,) = refused.stderr.splitlines()
            assert other in line
            assert "or end it: kill " in line
        outline = state_file.outline(Path(server.run_dir))
        assert outline is not None
        before = outline.alive
        again = subprocess.Popen([MESHLM, "serve", *FLAGS, *same, "--api-key", "a"], stderr=subprocess.DEVNULL, cwd="/")
        try:
            until(lambda: has_supervisor(server, 0), 60)
            rows = server.status()["processes"]
            assert rows[0]["pid"] == again.pid
            assert sorted(row["pid"] for row in rows[1:]) == sorted(before)
            body = {"prompt": [300], "max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
            headers = {"Authorization": "Bearer a"}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).json()
            assert answer["choices"][0]["token_ids"] == reference([300], 3)
            again.terminate()
            assert again.wait(timeout=30) == 0
            assert not any(map(runs, before))
        finally:
            again.kill()
