"""Kernels are kept somewhere, whatever can be written."""

import os
from pathlib import Path

import pytest

from meshlm.supervisor.processes import rundir
from meshlm.supervisor.processes.children import for_workers


def unwritable(folder: Path) -> Path:
    """A folder that nobody can make anything in, root neither."""
    folder.write_text("a file")
    return folder / "cache"


def environment(tmp_path: Path, **changes: str) -> dict[str, str]:
    (tmp_path / "run").mkdir(mode=0o700, exist_ok=True)
    return {"XDG_RUNTIME_DIR": str(tmp_path / "run"), **changes}


def test_the_usual_folders_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert for_workers("cuda", environment(tmp_path)) == ({}, "")
    assert (tmp_path / ".triton" / "cache").is_dir()


def test_others_take_their_place_and_are_named(tmp_path: Path) -> None:
    bad = str(unwritable(tmp_path / "file"))
    given = environment(tmp_path, XDG_CACHE_HOME=bad, TRITON_CACHE_DIR=bad)
    changed, said = for_workers("cuda", given)
    base = tmp_path / "run" / "meshlm" / "cache"
    assert changed == {"XDG_CACHE_HOME": str(base / "cache"), "TRITON_CACHE_DIR": str(base / "triton-cache")}
    assert said.count(f"{bad}: Not a directory: kernels are kept in {base}") == 2
    assert for_workers("cpu", given)[0].keys() == {"XDG_CACHE_HOME"}, "no Triton there"
    assert for_workers("fake", given) == ({}, "")
    rundir.remove_dead(base.parent)
    assert base.is_dir(), "it is no dead mesh's"


def test_a_user_without_a_home_has_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    changed, said = for_workers("cpu", environment(tmp_path))
    assert changed["XDG_CACHE_HOME"].startswith(str(tmp_path))
    assert "there is no home directory" in said


def test_a_place_that_is_not_ours_holds_no_programs(tmp_path: Path) -> None:
    given = environment(tmp_path, XDG_CACHE_HOME=str(unwritable(tmp_path / "file")))
    (base := rundir.base_dir(given) / "cache").mkdir(parents=True)
    base.chmod(0o777)
    changed, said = for_workers("cpu", given)
    assert changed == {}
    assert "kernels cannot be kept" in said
    assert "must be a directory of yours" in said


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "ro").mkdir(mode=0o500)
    changed, said = for_workers("cpu", environment(tmp_path, XDG_CACHE_HOME=str(tmp_path / "ro")))
    assert changed
    assert "Permission denied" in said
