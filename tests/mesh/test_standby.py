"""Standbys of a real mesh: each takes the place of a process that dies, and a stream goes on."""

import os
import signal
from pathlib import Path

import httpx
import pytest
from fake_answers import reference
from http_clients import events
from serving import Serving, serving
from waiting import until

pytestmark = pytest.mark.mesh
ROLES = ("detokenizer", "scheduler", "coordinator", "worker", "frontend")
KILLED_AT, COUNT = (20, 80, 140, 200), 260


def standbys(server: Serving) -> dict[str, int]:
    """Loaded ones, by role: children of the supervisor that say so in their title."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            title = (folder / "cmdline").read_bytes().rstrip(b"\0 ").decode()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # no process, or gone
        if parent == server.process.pid and title.startswith("meshlm: standby "):
            found[title.removeprefix("meshlm: standby ")] = int(folder.name)
    return found


def listed(server: Serving) -> list[tuple[str, str, int]]:
    """Standbys in `meshlm status --json`."""
    return sorted((row["role"], row["state"], row["pid"]) for row in server.status()["standbys"] if row["rss_bytes"])


def test_a_standby_of_each_role_takes_its_place() -> None:
    flags = ("--device", "fake", "--fake-step-ms", "10", "--max-model-len", "8192", "--standby-roles", *ROLES)
    with serving(*flags) as server:
        until(lambda: len(standbys(server)) == len(ROLES), limit_s=60)
        waiting = standbys(server)
        until(lambda: listed(server) == [(role, "standby", pid) for role, pid in sorted(waiting.items())], limit_s=30)
        body = {"prompt": [5, 6], "max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True, "stream": True}
        ids: list[int] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
            assert answer.status_code == 200
            for count, event in enumerate(events(answer.iter_lines())):
                ids += event["choices"][0]["token_ids"]
                if count in KILLED_AT:
                    os.kill(server.pid(ROLES[KILLED_AT.index(count)]), signal.SIGKILL)
        assert ids == reference([5, 6], COUNT)
        os.kill(server.pid("frontend"), signal.SIGKILL)
        until(lambda: {role: server.pid(role) for role in ROLES} == waiting, limit_s=30)
        until(lambda: len(standbys(server)) == len(ROLES), limit_s=60)  # and new ones are loaded
