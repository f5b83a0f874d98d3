"""Files in a folder: private, whole or not there, and the folder may hold what is not ours."""

import os
import stat
import time
from pathlib import Path

import pytest
from store_bench import NAMESPACE, key

from meshlm.store.disk.content import HEADER_BYTES, BadFile, name_of
from meshlm.store.disk.folder import Folder

KEY, OTHER = NAMESPACE + key(1), b"m" * 16 + key(2)
CONTENT = (b"page one", b"page two")


def pages(content: tuple[bytes, ...] = CONTENT) -> list[memoryview]:
    return [memoryview(bytearray(page)) for page in content]


def empty() -> list[memoryview]:
    return pages(tuple(bytes(len(page)) for page in CONTENT))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(tmp_path / "kv")
    assert found.write(KEY, pages()) == HEADER_BYTES + sum(map(len, CONTENT))
    return found


def test_what_is_written_is_read(folder: Folder) -> None:
    read = empty()
    folder.read(KEY, read)
    assert tuple(map(bytes, read)) == CONTENT


def test_only_its_owner_can_read_it(folder: Folder, tmp_path: Path) -> None:
    file = tmp_path / "kv" / name_of(KEY)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [stat.S_IMODE(path.stat().st_mode) for path in list(file.parents)[:3]] == [0o700] * 3
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_namespace_that_others_may_read_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "kv" / NAMESPACE.hex()).mkdir(parents=True)
    (tmp_path / "kv" / NAMESPACE.hex()).chmod(0o755)
    with pytest.raises(OSError, match="is another user's, or others may read it"):
        Folder(tmp_path / "kv").write(KEY, pages())


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "truncated"),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), "truncated"),
        (lambda file: file.write_bytes(b""), "truncated"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"X"), "sum"),
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), "foreign"),
    ],
)
def test_a_spoilt_file_is_found_out(folder: Folder, tmp_path: Path, spoil, why: str) -> None:  # type: ignore[no-untyped-def]
    spoil(tmp_path / "kv" / name_of(KEY))
    with pytest.raises(BadFile, match=why):
        folder.read(KEY, empty())


def test_what_is_deleted_is_gone_and_may_have_been_before(folder: Folder) -> None:
    folder.delete(KEY)
    folder.delete(KEY)
    with pytest.raises(FileNotFoundError):
        folder.read(KEY, empty())
    assert folder.list().sizes == {}


def test_a_list_has_all_namespaces_and_nothing_else_those_used_last_behind(folder: Folder, tmp_path: Path) -> None:
    folder.write(OTHER, pages())
    base = tmp_path / "kv"
    for number, one in enumerate((KEY, OTHER)):
        os.utime(base / name_of(one), (1000 + number, 1000 + number))
    (base / "README.md").write_text("mine")
    (base / NAMESPACE.hex() / "ab").mkdir(exist_ok=True)
    (base / NAMESPACE.hex() / "ab" / "notes").write_text("mine")
    size = HEADER_BYTES + sum(map(len, CONTENT))
    found = folder.list()
    assert list(found.sizes.items()) == [(KEY, size), (OTHER, size)]
    assert found.free_bytes is not None
    disk = os.statvfs(base)
    assert 0 <= found.free_bytes <= disk.f_frsize * disk.f_bavail
    folder.read(KEY, empty())
    assert list(folder.list().sizes) == [OTHER, KEY], "it was used"
    assert (base / NAMESPACE.hex() / "ab" / "notes").exists()


def test_what_a_dead_process_left_half_written_is_deleted_when_it_is_old(folder: Folder, tmp_path: Path) -> None:
    shard = (tmp_path / "kv" / name_of(KEY)).parent
    for name, age_s in (("old.tmp", 3600), ("new.tmp", 1)):
        (shard / name).touch()
        os.utime(shard / name, (time.time() - age_s,) * 2)
    folder.list()
    assert [path.name for path in shard.glob("*.tmp")] == ["new.tmp"]


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    found = Folder(tmp_path / "not" / "there")
    assert found.list().sizes == {}
    assert not (tmp_path / "not").exists()


def test_a_failed_write_leaves_nothing(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write(NAMESPACE + key(3), pages())
    assert len([path for path in (tmp_path / "kv").rglob("*") if path.is_file()]) == 1


def test_a_link_is_not_followed(folder: Folder, tmp_path: Path) -> None:
    file = tmp_path / "kv" / name_of(KEY)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        folder.read(KEY, empty())


def test_a_hundred_thousand_files_are_listed_within_seconds(tmp_path: Path) -> None:
    """A fifth of them here, in a fifth of the time."""
    base, count = tmp_path / "kv", 20_000
    for number in range(count):
        file = base / name_of(NAMESPACE + key(number))
        if not file.parent.is_dir():
            file.parent.mkdir(parents=True)
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))
    begin = time.process_time()
    assert len(Folder(base).list().sizes) == count
    assert time.process_time() - begin < 1.0
