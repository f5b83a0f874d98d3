"""A sandbox: jobs are answered by warm children, each limit ends a child by name, and nothing outlives whoever asked."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshlm.runtime.sandbox.limits import MIB, ChildDied, Limit, Limits
from meshlm.runtime.sandbox.sandbox import Busy, LaneConfig, Lanes, Sandbox, SandboxFailed

LIMITS = Limits(cpu_s=0.3, memory_bytes=64 * MIB, stack_bytes=4 * MIB)
WALL_S = 60.0
SUPPORT = Path(__file__).parent.parent / "support"


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    made = Sandbox("sandboxed", b"made: ", "test")
    yield made
    made.close()


def is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until_gone(*pids: int) -> None:
    until = time.monotonic() + 30
    while any(map(is_there, pids)):
        assert time.monotonic() < until, "it is still there"
        time.sleep(0.01)


def test_a_warm_child_answers_any_bytes(sandbox: Sandbox) -> None:
    data = os.urandom(5 * MIB)
    assert sandbox.run(b"echo " + data, LIMITS, WALL_S) == b"made: " + data
    first, second = (sandbox.run(b"who", LIMITS, WALL_S).split() for _ in range(2))
    assert first[0] == second[0]  # what `make` loaded, it loaded once
    assert len({*first, *second}) == 3


@pytest.mark.parametrize(
    ("job", "limit", "told"),
    [
        (b"spin", Limit.CPU, "more than 0.3 s of CPU time"),
        (b"take 200", Limit.MEMORY, "more than 64 MiB of memory"),
        (b"fault", Limit.STACK, "more than 4 MiB of stack"),
        (b"recurse 8", Limit.STACK, "more than 4 MiB of stack"),
        (b"end", Limit.KILLED, "signal 9"),
    ],
)
def test_a_limit_ends_the_child_by_its_name(sandbox: Sandbox, job: bytes, limit: Limit, told: str) -> None:
    with pytest.raises(ChildDied, match=told) as died:
        sandbox.run(job, LIMITS, WALL_S)
    assert died.value.limit is limit
    assert died.value.is_of_the_job == (limit is not Limit.KILLED)
    assert sandbox.run(b"echo on", LIMITS, WALL_S) == b"made: on"


def test_within_the_limits_nothing_ends(sandbox: Sandbox) -> None:
    assert sandbox.run(b"take 32", LIMITS, WALL_S) == str(32 * MIB).encode()
    deep = Limits(memory_bytes=256 * MIB, stack_bytes=64 * MIB)
    assert sandbox.run(b"recurse 24", deep, WALL_S) == b"touched"  # three times what processes have by default


def test_limits_of_the_host_that_are_lower_stay() -> None:
    """`ulimit -Hs 2048` say: a child begins all the same."""
    script = f"""
import resource
from meshlm.runtime.sandbox.limits import Limits
from meshlm.runtime.sandbox.sandbox import Sandbox
for kind, most in ((resource.RLIMIT_STACK, {2 * MIB}), (resource.RLIMIT_AS, {2048 * MIB}), (resource.RLIMIT_CPU, 100)):
    resource.setrlimit(kind, (most, most))
wide = Limits(cpu_s=200.0, memory_bytes={8192 * MIB}, stack_bytes={64 * MIB})
print(Sandbox("sandboxed", b"", "test").run(b"echo on", wide, {WALL_S}).decode(), flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout == "on\n", done.stderr


def test_time_that_passes_is_not_the_jobs_fault(sandbox: Sandbox) -> None:
    sandbox.run(b"echo", LIMITS, WALL_S)  # it is loaded
    with pytest.raises(ChildDied, match="not done within") as died:
        sandbox.run(b"sleep", LIMITS, 0.2)
    assert died.value.limit is Limit.WALL
    assert not died.value.is_of_the_job


def test_what_a_child_raises_is_told(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailed, match="ValueError: what"):
        sandbox.run(b"what", LIMITS, WALL_S)


def test_a_child_is_killed_when_nobody_waits(sandbox: Sandbox) -> None:
    child = sandbox.open(LIMITS)
    assert is_there(child.pid)
    child.close()
    wait_until_gone(child.pid)


def test_a_fork_server_that_died_is_replaced(sandbox: Sandbox) -> None:
    server = int(sandbox.run(b"who", LIMITS, WALL_S).split()[0])
    waiting = sandbox.open(LIMITS)
    os.kill(server, 9)
    wait_until_gone(server, waiting.pid)
    assert waiting.died().limit is Limit.KILLED
    waiting.close()
    assert sandbox.run(b"echo on", LIMITS, WALL_S) == b"made: on"


def test_what_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox("no_such_module", b"", "test")
    with pytest.raises(SandboxFailed, match="no process could be started"):
        sandbox.run(b"echo", LIMITS, WALL_S)
    sandbox.close()


def test_all_end_with_the_process_that_asked() -> None:
    script = f"""
import os, sys
from meshlm.runtime.sandbox.limits import Limits
from meshlm.runtime.sandbox.sandbox import Sandbox
sandbox = Sandbox("sandboxed", b"", "test")
limits = Limits(memory_bytes=1 << 26, stack_bytes=1 << 22)
print(sandbox.run(b"who", limits, {WALL_S}).split()[0].decode(), sandbox.open(limits).pid, flush=True)
os.kill(os.getpid(), 9)
"""
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, env=environment)
    wait_until_gone(*map(int, done.stdout.split()))
    assert len(done.stdout.split()) == 2, done.stderr


def test_the_quick_pass_the_slow(sandbox: Sandbox) -> None:
    config = LaneConfig(num_quick=1, num_slow=1, quick_cpu_s=0.1, max_slow_waiting=1)
    lanes = Lanes(sandbox, Limits(cpu_s=2.0, memory_bytes=64 * MIB, stack_bytes=4 * MIB), config)
    ended: list[str] = []

    def slow() -> None:
        try:
            lanes.run(b"spin")
        except ChildDied as died:
            ended.append(died.message)
        except Busy:
            ended.append("busy")

    threads = [threading.Thread(target=slow) for _ in range(3)]
    for thread in threads:
        thread.start()
    while "busy" not in ended:  # one runs, one waits, and the third may not
        assert any(thread.is_alive() for thread in threads)
        time.sleep(0.01)
    assert lanes.run(b"echo 1") == b"made: 1"
    assert ended == ["busy"]
    for thread in threads:
        thread.join(60)
    assert ended == ["busy", *["it takes more than 2 s of CPU time"] * 2]
