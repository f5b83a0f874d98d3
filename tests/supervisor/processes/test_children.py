"""Processes of the mesh end with the one that started them, and know no more than they need."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from waiting import until

from meshlm.protocol.config import MeshConfig, RunConfig, ServerConfig
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.supervisor.processes.children import FOLDER, LARGE_PAGES, SPINS, Child, config_file, variables_of
from meshlm.supervisor.settings import flags, resolve

LIMIT_S = 60.0
PR_SET_CHILD_SUBREAPER = 36

# A supervisor that starts a process of a role and dies soon after; whoever it leaves behind becomes this program's child.
REAPER = f"""
import ctypes, os, signal, subprocess, sys, time

role, standby, delay, run_dir = sys.argv[1:]
ctypes.CDLL(None).prctl({PR_SET_CHILD_SUBREAPER}, 1, 0, 0, 0)
supervisor = subprocess.Popen([sys.executable, "-P", "-c", '''
import os, signal, sys, time
from meshlm.protocol.config import MeshConfig, RunConfig
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.supervisor.processes import children

role, standby, delay, run_dir = sys.argv[1:]
config = MeshConfig(run=RunConfig(run_dir=run_dir))
children.Child(Identity(Role(role), 0), Incarnation(1), config, standby=standby == "standby")
time.sleep(float(delay))
os.kill(os.getpid(), signal.SIGKILL)
''', *sys.argv[1:]])
assert supervisor.wait() == -signal.SIGKILL
print("left alone", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
print("all have ended", flush=True)
"""


@pytest.mark.parametrize(("standby", "delay_s"), [("", 0.0), ("", 0.03), ("", 0.1), ("", 0.2), ("standby", 0.0)])
def test_who_is_left_alone_at_once_ends(standby: str, delay_s: float, tmp_path: Path) -> None:
    """The time until a process has asked the kernel for its parent's death is no window."""
    command = [sys.executable, "-P", "-c", REAPER, Role.COORDINATOR.value, standby, str(delay_s), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as reaper:
        try:
            assert reaper.stdout is not None
            assert reaper.stdout.readline() == "left alone\n"
            began, pids = time.monotonic(), children_of(reaper.pid)
            ended = reaper.wait(LIMIT_S / 4)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{pids} live on {time.monotonic() - began:.0f} s after their supervisor")
        finally:
            for pid in children_of(reaper.pid):
                os.kill(pid, signal.SIGKILL)
            reaper.kill()
        assert ended == 0


def children_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_workers_on_a_cpu_have_large_pages_unless_the_user_has_said_otherwise(device: str) -> None:
    config = resolve.resolve(flags.build({"device": device}, None))
    found = variables_of(Role.WORKER, config, {"A": "b"}, {"XDG_CACHE_HOME": "/c"})
    assert found.pop("GLIBC_TUNABLES", None) == (LARGE_PAGES if device == "cpu" else None)
    usual = {"GOMP_SPINCOUNT": SPINS, "PYTHONSAFEPATH": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    assert found == {"A": "b", "XDG_CACHE_HOME": "/c", **usual}
    given = {
        "GLIBC_TUNABLES": "glibc.malloc.arena_max=1",
        "OMP_WAIT_POLICY": "passive",
        "TRITON_DEFAULT_FP_FUSION": "0",
    }
    assert variables_of(Role.WORKER, config, given, {}) == {**given, "PYTHONSAFEPATH": "1"}
    ids = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, device_ids="1"))
    visible = {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert variables_of(Role.WORKER, ids, visible, {})["CUDA_VISIBLE_DEVICES"] == "5"
    assert variables_of(Role.FRONTEND, ids, visible, {})["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert variables_of(Role.SCHEDULER, config, {"VLLM_API_KEY": "secret"}, {"X": "y"}) == {"PYTHONSAFEPATH": "1"}


@pytest.mark.parametrize("role", FOLDER)
def test_only_frontends_get_the_keys_of_the_api(role: Role) -> None:
    config = MeshConfig(server=ServerConfig(api_key=("secret-7",)), run=RunConfig(run_dir="/run/x"))
    with open(config_file(config, role), "rb") as file:
        content = file.read()
    assert (b"secret-7" in content) == (role is Role.FRONTEND)
    assert msgspec.json.decode(content, type=MeshConfig).run == config.run


def environment_of(pid: int) -> bytes:
    """It is there a moment after the program has begun."""
    file = Path(f"/proc/{pid}/environ")
    until(lambda: b"PYTHONSAFEPATH" in file.read_bytes(), limit_s=10)
    return file.read_bytes()


def test_no_key_is_in_the_environment_of_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MESHLM_API_KEY", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "secret-8")
    child = Child(Identity(Role.FRONTEND, 0), Incarnation(1), MeshConfig(run=RunConfig(run_dir=str(tmp_path))))
    try:
        environment = environment_of(child.pid)
        assert b"secret-8" not in environment + Path(f"/proc/{child.pid}/cmdline").read_bytes()
    finally:
        child._end()
        os.close(child._pidfd)


@pytest.mark.parametrize("role", [Role.WORKER, Role.SCHEDULER])
def test_workers_are_told_where_kernels_are_kept(role: Role, tmp_path: Path) -> None:
    config = MeshConfig(run=RunConfig(run_dir=str(tmp_path)))
    child = Child(Identity(role, 0), Incarnation(1), config, {"TRITON_CACHE_DIR": "/kept/here"})
    try:
        assert (b"/kept/here" in environment_of(child.pid)) == (role is Role.WORKER)
    finally:
        child._end()
        os.close(child._pidfd)
