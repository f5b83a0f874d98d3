"""A mesh of two nodes with the fake device: joined, cut, restored, delayed, refused. Tokens are as on one node, always."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from chrome_format import check
from fake_answers import reference
from hosts import LINKS, Link, ProxyLink, head, link_of, made_keys, node, on_rank, states, stream
from serving import MESHLM, Serving, meshlm
from waiting import until

pytestmark = pytest.mark.mesh
LIMIT_S = 40
SLOW = ("--fake-step-ms", "10")
SHORT = ("--peer-timeout", "1")
RANK_2 = ("--data-parallel-start-rank", "2")
RANK_1 = ("--data-parallel-start-rank", "1")
LOCAL = ("--data-parallel-size-local", "1")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made_keys(tmp_path_factory.mktemp("keys") / "mesh.key")


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    with link_of(request.param) as made:
        yield made


class Load:
    """Many streams at once; `check` says that each has had its tokens."""

    def __init__(self, server: Serving, num_streams: int, count: int) -> None:
        self._pool = ThreadPoolExecutor(num_streams)
        begun: list[threading.Event] = []
        self._answers: list[tuple[list[int], Future[list[int]]]] = []
        for number in range(num_streams):
            prompt = [1000 + number] * (10 + number)
            begun.append(threading.Event())
            self._answers.append((prompt, self._pool.submit(stream, server, prompt, count + number, begun[-1].set)))
        assert all(event.wait(LIMIT_S) for event in begun)

    def check(self, count: int) -> None:
        for number, (prompt, answer) in enumerate(self._answers):
            assert answer.result(timeout=LIMIT_S) == reference(prompt, count + number)
        self._pool.shutdown()


def test_the_node_first_then_the_head(link: Link, key_file: str) -> None:
    """The node waits for the head; both ranks serve; status shows all; the node ends with the head."""
    second = node(link, key_file, *RANK_1)
    second.wait_for("waiting for the head")
    first = head(link, key_file, *LOCAL)
    try:
        first.wait_for("ready: http")
        second.wait_for("ready: this node serves")
        for rank in (0, 1):
            on_rank(first, rank)
        until(lambda: states(first).get("scheduler/1") == states(first).get("worker/1") == "ready")
        rows = {f"{row['role']}/{row['index']}": row for row in first.status()["processes"]}
        assert all(row["host"] for row in rows.values())
        assert rows["scheduler/1"]["pid"] == second.pid("scheduler")
        assert sorted(states(second)) == ["scheduler/1", "supervisor/2", "worker/1"]
    finally:
        assert first.stop() == 0
        assert second.process.wait(timeout=LIMIT_S) == 0
        second.stop()
    assert any("the head ends" in line for line in second.lines)


def test_a_cut_link_and_its_restoration(link: Link, key_file: str) -> None:
    """Streams of the rank that cannot be reached go on elsewhere, with the same tokens; then it serves again."""
    flags = (*SLOW, *SHORT)
    first, second = head(link, key_file, *LOCAL, *flags), node(link, key_file, *RANK_1, *flags)
    try:
        first.wait_for("ready: http")
        second.wait_for("ready: this node serves")
        on_rank(first, 1)
        load = Load(first, 16, 250)
        link.cut()
        load.check(250)
        first.wait_for("(supervisor/2) is lost: silent for 1 s")
        second.wait_for("this node goes on and waits for it")
        assert states(first)["scheduler/1"] == "lost"
        on_rank(first, 0)
        link.restore()
        second.wait_for("joined tcp://")
        on_rank(first, 1)
        load = Load(first, 8, 60)
        load.check(60)
        until(lambda: states(first)["scheduler/1"] == "ready")
        assert all(row["restarts"] == 0 for row in first.status()["processes"]), (
            "a process was restarted for a cut link"
        )
    finally:
        first.stop()
        second.stop()


def test_a_cut_shorter_than_the_timeout_is_a_pause(link: Link, key_file: str) -> None:
    first, second = head(link, key_file, *LOCAL, *SLOW), node(link, key_file, *RANK_1, *SLOW)
    try:
        first.wait_for("ready: http")
        second.wait_for("ready: this node serves")
        on_rank(first, 1)
        load = Load(first, 8, 150)
        link.cut()
        threading.Event().wait(0.5)
        link.restore()
        load.check(150)
        on_rank(first, 1)
        assert not any("is lost" in line for line in first.lines)
    finally:
        first.stop()
        second.stop()


def test_a_mesh_whose_only_rank_is_cut_off(link: Link, key_file: str) -> None:
    """There is no other rank: the streams wait, and go on where they were."""
    flags = ("-dp", "1", *SLOW, *SHORT)
    first = head(link, key_file, "--data-parallel-size-local", "0", *flags)
    second = node(link, key_file, "--data-parallel-start-rank", "0", *flags)
    try:
        first.wait_for("ready: http")
        second.wait_for("ready: this node serves")
        on_rank(first, 0)
        load = Load(first, 4, 150)
        link.cut()
        first.wait_for("is lost: silent")
        link.restore()
        load.check(150)
    finally:
        first.stop()
        second.stop()


def test_a_slow_link(key_file: str) -> None:
    """40 ms each way: slower, nothing else."""
    with link_of("proxy") as link:
        assert isinstance(link, ProxyLink)
        link.proxy.delay_s = 0.04
        first, second = head(link, key_file, *LOCAL, *SHORT), node(link, key_file, *RANK_1, *SHORT)
        try:
            first.wait_for("ready: http")
            second.wait_for("ready: this node serves")
            on_rank(first, 1, 60)
            load = Load(first, 8, 40)
            load.check(40)
            assert not any("is lost" in line for line in first.lines)
        finally:
            first.stop()
            second.stop()


@pytest.fixture(scope="module")
def running(key_file: str) -> Iterator[tuple[ProxyLink, Serving, Serving]]:
    """A mesh of two nodes for tests that may not harm it."""
    with link_of("proxy") as link:
        assert isinstance(link, ProxyLink)
        first = head(link, key_file, "-dp", "3", *LOCAL)
        second = node(link, key_file, "-dp", "3", *LOCAL, *RANK_1)
        try:
            first.wait_for("ready: http")
            second.wait_for("ready: this node serves")
            until(lambda: states(first).get("scheduler/1") == "ready")
            yield link, first, second
        finally:
            first.stop()
            second.stop()


REFUSED = [
    (("--max-model-len", "512", *RANK_2), "--max-model-len is 8192 on the head and 512 on the node"),
    (("-dp", "4", *RANK_2), "--data-parallel-size is 3 on the head and 4 on the node"),
    (("--block-size", "32", "--dtype", "bfloat16", *RANK_2), "--dtype is float32 on the head and bfloat16 on the node"),
    (("--load-format", "dummy", *RANK_2), "the model is "),
    (("--data-parallel-start-rank", "0"), "rank 0 runs on the head already"),
    (("--data-parallel-start-rank", "0", "--data-parallel-size-local", "3"), "rank 0 runs on the head already"),
    (RANK_1, "is in this mesh already"),
]


@pytest.mark.parametrize(("flags", "text"), REFUSED, ids=[text[:24] for _, text in REFUSED])
def test_a_node_that_does_not_fit_is_refused(
    running: tuple[ProxyLink, Serving, Serving], key_file: str, flags: tuple[str, ...], text: str
) -> None:
    link, first, second = running
    before = {row["pid"] for row in first.status()["processes"]}
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(stream, first, [400, 401], 60)
        third = node(link, key_file, "-dp", "3", *flags)
        assert third.process.wait(timeout=LIMIT_S) == 1
        third.stop()
        assert beside.result(timeout=LIMIT_S) == reference([400, 401], 60)
    told = [line for line in third.lines if line.startswith("meshlm:") and "without effect" not in line]
    assert len(told) == 1, third.lines
    assert text in told[0]
    on_rank(first, 1)
    assert {row["pid"] for row in first.status()["processes"]} == before
    assert second.process.poll() is None


def test_a_node_with_another_key_is_refused(running: tuple[ProxyLink, Serving, Serving], tmp_path: Path) -> None:
    link, first, _ = running
    third = node(link, made_keys(tmp_path / "other.key"), *RANK_1)
    assert third.process.wait(timeout=LIMIT_S) == 1
    third.stop()
    assert "does not take the key" in third.lines[-1]
    said = [line for line in first.lines if "connection refused" in line]
    assert len(said) == 1, said
    assert "it has the key of another mesh" in said[0]
    on_rank(first, 1)


def test_a_head_that_is_not_there(key_file: str) -> None:
    with link_of("proxy") as link:
        began = time.monotonic()
        lonely = node(link, key_file, *RANK_1, "--startup-timeout", "3")
        assert lonely.process.wait(timeout=LIMIT_S) == 1
        lonely.stop()
        assert time.monotonic() - began > 3
        assert any("waiting for the head" in line for line in lonely.lines)
        assert re.search(r"--join tcp://\S+: the head could not be reached within 3 s", lonely.lines[-1])


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_a_killed_process_of_the_other_node(running: tuple[ProxyLink, Serving, Serving], role: str) -> None:
    """Its own supervisor starts it again; the head hears of the death at once, not when the silence is long enough."""
    _, first, second = running
    load = Load(first, 8, 100)
    os.kill(second.pid(role), signal.SIGKILL)
    second.wait_for(f"{role}/1 is ready")
    load.check(100)
    on_rank(first, 1)
    assert not any(f"peer={role}/1" in line and "silent" in line for line in first.lines)


def test_a_timeline_has_the_processes_of_both_nodes(
    running: tuple[ProxyLink, Serving, Serving], tmp_path: Path
) -> None:
    _, first, _ = running
    done = meshlm(first, "trace", "--seconds", "0.2", "-o", str(tmp_path / "trace.json"))
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check(events)
    names = {one["args"]["name"].split()[0] for one in events if one["name"] == "process_name"}
    assert {"scheduler/0", "worker/0", "scheduler/1", "worker/1", "frontend/0", "coordinator/0"} <= names
    assert "did not tell" not in done.stdout


def test_secrets_are_not_shown(key_file: str) -> None:
    """An API key and the mesh's secret key: not in logs, `ps`, status, metrics, children's environments, collect-env."""
    mesh_secret = json.loads(Path(key_file).read_text())["secret_key"]
    with link_of("proxy") as link:
        server = head(
            link, key_file, "--data-parallel-size-local", "2", "--api-key", "hidden-key-7", "--log-level", "debug"
        )
        try:
            server.wait_for("ready: http")
            headers = {"Authorization": "Bearer hidden-key-7"}
            seen = [httpx.get(f"{server.url}/metrics", headers=headers).text]
            httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer hidden-key-8"})
            rows = server.status()["processes"]
            seen.append(json.dumps(rows))
            for row in rows:
                seen += [
                    Path(f"/proc/{row['pid']}/{file}").read_text("utf-8", "replace") for file in ("cmdline", "environ")
                ]
            seen.append(
                subprocess.run([MESHLM, "collect-env"], capture_output=True, text=True, check=True, cwd="/").stdout
            )
            for file in Path(server.run_dir).iterdir():
                if file.is_file() and file.suffix == ".json":
                    assert file.stat().st_mode & 0o077 == 0
        finally:
            server.stop()
        for text in (*seen, *server.lines):
            assert "hidden-key" not in text
            assert mesh_secret not in text
