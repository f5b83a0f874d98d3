"""Nobody but its user can get into a run directory or put another in its place; one mesh is in it, and leaves nothing behind."""

import contextlib
import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import free_port

from meshlm.supervisor.cli import status
from meshlm.supervisor.errors import StartError
from meshlm.supervisor.processes import rundir
from meshlm.supervisor.settings import resolve

NOBODY = 65_534 if os.getuid() != 65_534 else 65_533
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def long_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket is made here, and pytest's own folders may have long names."""
    monkeypatch.setattr(rundir, "MAX_SOCKET_PATH", 4096)


def take(path: Path) -> Path:
    with rundir.taken(path) as real:
        return real


def test_a_private_directory_is_made_and_removed(tmp_path: Path) -> None:
    wanted = tmp_path / "base" / "8000"
    with rundir.taken(wanted) as path:
        assert path == wanted
        for made in (path, path.parent):
            assert stat.S_IMODE(made.stat().st_mode) == 0o700
        (path / "worker-0.sock").touch()
        (path / "metrics").mkdir()
    assert not wanted.exists()


def test_one_that_was_there_stays_without_what_is_ours(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for name in (
        "mesh.json",
        "worker-0.sock",
        "worker-0.stacks.txt",
        "responses.sqlite",
        "responses.sqlite-wal",
        "notes",
    ):
        (tmp_path / name).write_text("of an earlier mesh")
    with rundir.taken(tmp_path):
        assert [entry.name for entry in tmp_path.iterdir()] == ["notes"]
        (tmp_path / "worker-0.stacks.txt").write_text("Thread 0x1 in step")
        (tmp_path / "worker-1.stacks.txt").touch()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes", "worker-0.stacks.txt"], (
        "stacks are to be read"
    )


def test_a_place_that_anybody_can_write_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As /tmp is where it is a volume of Kubernetes; nobody but its owner, root or this user, can have made it so."""
    tmp_path.chmod(0o777)
    assert take(tmp_path / "8000") == tmp_path / "8000"
    assert (
        f"other users can replace the run directory {tmp_path}/8000: they can write in {tmp_path}\n"
        in capsys.readouterr().err
    )
    tmp_path.chmod(0o1777)  # the sticky bit, as in most
    take(tmp_path / "8000")
    assert capsys.readouterr().err == ""


def test_a_base_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    """We make it, so it is private or somebody else's."""
    (tmp_path / "meshlm-0").mkdir()
    (tmp_path / "meshlm-0").chmod(0o777)
    with pytest.raises(StartError, match="must be a directory of yours"):
        rundir.remove_dead(tmp_path / "meshlm-0")


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "8000").symlink_to(tmp_path / "other")
    with pytest.raises(StartError, match="must be a directory of yours"):
        take(tmp_path / "8000")


@as_root
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir(mode=0o755)
    os.chown(base, NOBODY, NOBODY)
    (base / "ours").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(base / "ours")
    for way in (base / "8000", base / "ours" / "8000", tmp_path / "link" / "8000"):
        with pytest.raises(StartError, match="base is another user's, who could take the mesh over"):
            take(way)
    with pytest.raises(StartError, match="must be a directory of yours"):
        rundir.running(base)
    with pytest.raises(StartError, match="must be a directory of yours"):
        rundir.remove_dead(base)


def test_an_owner_of_a_directory_above_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the test above, for those who are not root."""
    real, above = Path.stat, tmp_path.parent

    def stat_of(path: Path, **options: Any) -> Any:
        info = real(path, **options)
        return SimpleNamespace(st_uid=NOBODY, st_mode=info.st_mode) if path == above else info

    monkeypatch.setattr(Path, "stat", stat_of)
    with pytest.raises(StartError, match=f"{above} is another user's"):
        take(tmp_path / "8000")


@as_root
def test_a_runtime_directory_of_another_user_is_not_ours(tmp_path: Path) -> None:
    """`sudo` may leave XDG_RUNTIME_DIR as it was."""
    assert rundir.base_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "meshlm"
    os.chown(tmp_path, NOBODY, NOBODY)
    assert rundir.base_dir({"XDG_RUNTIME_DIR": str(tmp_path)}).name == f"meshlm-{os.getuid()}"


def test_a_second_mesh_is_refused_and_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "LOCK_WAIT_S", 0.0)
    with rundir.taken(tmp_path / "8000") as path:
        (path / "status.sock").touch()
        with pytest.raises(StartError, match="another mesh runs there"):
            take(path)
        assert (path / "status.sock").exists()


def test_of_those_that_start_at_once_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "LOCK_WAIT_S", 0.0)
    monkeypatch.setattr(rundir, "base_dir", lambda environment: tmp_path)  # else the one that made it removes it
    together, inside, got, ended = threading.Barrier(8), threading.Barrier(8), [], []

    def start() -> None:
        together.wait(30)
        try:
            with rundir.taken(tmp_path / "8000") as path:
                got.append(path)
                (path / "status.sock").touch()
                inside.wait(30)
                ended.append((path / "status.sock").exists())
        except StartError:
            inside.wait(30)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(got), ended) == (1, [True])
    assert not (tmp_path / "8000").exists()


def test_who_comes_while_the_last_mesh_removes_it_makes_it_again(tmp_path: Path) -> None:
    """The lock that it gets then is of a directory that is not there any more."""
    first = rundir.taken(tmp_path / "8000")
    first.__enter__()
    taken = threading.Event()

    def start() -> None:
        with rundir.taken(tmp_path / "8000") as path:
            (path / "status.sock").touch()
            taken.set()

    thread = threading.Thread(target=start)
    thread.start()
    first.__exit__(None, None, None)
    thread.join(30)
    assert taken.is_set()


def test_what_dead_meshes_left_is_removed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for name in ("8001", "llm-1"):
        (tmp_path / name).mkdir(mode=0o700)
        (tmp_path / name / "mesh.json").write_text("with a key")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes").touch()
    with rundir.taken(tmp_path / "8000") as alive:
        (alive / "status.sock").touch()
        rundir.remove_dead(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["8000", "kept"]
        assert rundir.running(tmp_path) == [alive]


@as_root
def test_root_may_ask_another_users_mesh_but_not_run_what_it_says(tmp_path: Path) -> None:
    """As with the systemd unit, whose user is made up."""
    tmp_path.chmod(0o700)
    os.chown(tmp_path, NOBODY, NOBODY)
    assert status.find(None, str(tmp_path)) == tmp_path
    with pytest.raises(StartError, match="must be a directory of yours"):
        status.find(None, str(tmp_path), or_root=False)


def test_what_cannot_be_removed_is_named(tmp_path: Path) -> None:
    """As on a disk that has become read-only."""
    tmp_path.chmod(0o700)
    (tmp_path / "worker-0.sock").mkdir()
    with pytest.raises(StartError, match=r"worker-0\.sock: "):
        take(tmp_path)


def test_a_port_is_for_one_mesh_before_anybody_listens() -> None:
    port = free_port()
    with (
        resolve.claim_port("127.0.0.1", port),
        pytest.raises(StartError, match=f"--port {port}: Address already in use"),
    ):
        resolve.claim_port("127.0.0.1", port)
    resolve.claim_port("127.0.0.1", port).close()


def test_a_relative_path_where_the_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(StartError, match="--run-dir here: No such file"):
        take(Path("here"))


@pytest.mark.parametrize(
    ("stop", "is_there"), [(SystemExit(0), False), (KeyboardInterrupt(), False), (SystemExit(1), True)]
)
def test_last_events_are_kept_of_what_failed_alone(stop: BaseException, is_there: bool, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "run"
    with contextlib.suppress(SystemExit, KeyboardInterrupt), rundir.taken(path):
        (path / "supervisor-0.events").write_bytes(b"x")
        raise stop
    assert path.exists() == is_there
