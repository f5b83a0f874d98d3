"""The state file of a run directory: who is left in it, and what it keeps of the keys."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from meshlm.protocol.config import MeshConfig, ServerConfig
from meshlm.protocol.wire.digest import schema_digest
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.supervisor import taking_over
from meshlm.supervisor.errors import StillRuns
from meshlm.supervisor.group.succession import MeshState, Place
from meshlm.supervisor.processes import proc_stat, rundir, shared_folders, state_file
from meshlm.supervisor.processes.adopted import Adopted


def left(pid: int, ticks: int, config: MeshConfig | None = None) -> MeshState:
    config = config or MeshConfig()
    return MeshState(
        digest=schema_digest(),
        version="0.0",
        supervisor=Incarnation(1),
        asked=state_file.without_keys(config),
        config=state_file.without_keys(config),
        keys=state_file.digest_of_keys(config),
        places=(Place(identity=Identity(Role.WORKER), incarnation=Incarnation(2), pid=pid, start_ticks=ticks),),
    )


def own_ticks() -> int:
    found = proc_stat.of(os.getpid())
    assert found is not None
    return found.start_ticks


def test_a_directory_with_processes_is_not_removed_and_one_without_is(tmp_path: Path) -> None:
    base = tmp_path / "base"
    for name, ticks in (("lives", own_ticks()), ("is over", own_ticks() + 1)):  # the pid is another process's now
        path = rundir.private(base / name)
        state_file.write(path, left(os.getpid(), ticks))
    assert state_file.has_orphans(base / "lives")
    assert not state_file.has_orphans(base / "is over")
    assert shared_folders._runs(base / "lives")
    rundir.remove_dead(base)
    assert [path.name for path in base.iterdir()] == ["lives"]


def test_one_that_has_ended_and_waits_for_its_parent_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = proc_stat.of(child.pid)
        assert found is not None
        assert proc_stat.runs(child.pid, found.start_ticks)
        place = left(child.pid, found.start_ticks).places[0]
        assert Adopted(place, has_pipe=False).pid == child.pid
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not proc_stat.runs(child.pid, found.start_ticks)
        with pytest.raises(ProcessLookupError):
            Adopted(place, has_pipe=False)


def test_the_file_has_no_key_but_knows_them_again(tmp_path: Path) -> None:
    config = MeshConfig(server=ServerConfig(api_key=("secret-5",), admin_api_key=("secret-6",)))
    state_file.write(tmp_path, left(1, 1, config))
    file = tmp_path / state_file.FILE
    assert b"secret" not in file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600
    found = state_file.read(tmp_path)
    assert found is not None
    assert state_file.has_keys(found, config)
    assert not state_file.has_keys(found, MeshConfig())
    assert state_file.with_keys_of(found.config, config) == config


def test_other_flags_and_other_versions_are_named(tmp_path: Path) -> None:
    config = MeshConfig()
    state = left(os.getpid(), own_ticks())
    state_file.write(tmp_path, state)
    assert taking_over.checked(state, config, tmp_path) is state
    moved = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, run_dir=str(tmp_path)))
    assert taking_over.checked(state, moved, tmp_path) is state, "the directory is found, however it is named"
    other = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, max_restarts=9))
    with pytest.raises(StillRuns, match=f"--max-restarts was 5; start it as it was, .* kill {os.getpid()}$"):
        taking_over.checked(state, other, tmp_path)
    old = msgspec.structs.replace(state, digest="another")
    with pytest.raises(StillRuns, match=r"the protocol of 0\.0, which is not this one's"):
        taking_over.checked(old, config, tmp_path)
    with pytest.raises(StillRuns):
        taking_over.checked(state, config, tmp_path, renders_only=True)


def test_nonsense_in_its_place_is_nobodys(tmp_path: Path) -> None:
    for text in (b"", b"\xff\xfe", b"[]", b'{"digest": 3}'):
        (tmp_path / state_file.FILE).write_bytes(text)
        assert state_file.read(tmp_path) is None
        assert not state_file.has_orphans(tmp_path)
