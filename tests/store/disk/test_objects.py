"""The same at a URL."""

import fsspec
import pytest
from store_bench import NAMESPACE, key

from meshlm.runtime.model_files.object_store import folder_of
from meshlm.store.disk.content import HEADER_BYTES, BadFile, name_of
from meshlm.store.disk.objects import Objects

KEY = NAMESPACE + key(1)


def pages(*content: bytes) -> list[memoryview]:
    return [memoryview(bytearray(page)) for page in content]


@pytest.fixture
def objects() -> Objects:
    system = fsspec.filesystem("memory")
    system.store.clear()
    return Objects(folder_of("memory://bucket/kv"))


def test_what_is_written_is_listed_read_and_deleted(objects: Objects) -> None:
    assert objects.list().sizes == {}
    size = HEADER_BYTES + 8
    assert objects.write(KEY, pages(b"abcd", b"efgh")) == size
    fsspec.filesystem("memory").pipe_file("/bucket/kv/README.md", b"mine")
    found = objects.list()
    assert (found.sizes, found.free_bytes) == ({KEY: size}, None)
    read = pages(bytes(4), bytes(4))
    objects.read(KEY, read)
    assert [bytes(page) for page in read] == [b"abcd", b"efgh"]
    objects.delete(KEY)
    objects.delete(KEY)
    with pytest.raises(FileNotFoundError):
        objects.read(KEY, read)


@pytest.mark.parametrize(("content", "why"), [(b"short", "truncated"), (bytes(HEADER_BYTES + 8), "foreign")])
def test_a_spoilt_object_is_found_out(objects: Objects, content: bytes, why: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"/bucket/kv/{name_of(KEY)}", content)
    with pytest.raises(BadFile, match=why):
        objects.read(KEY, pages(bytes(4), bytes(4)))


def test_errors_of_a_storages_package_are_os_errors(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **more: object) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", fails)
    with pytest.raises(OSError, match="RuntimeError: no credentials"):
        objects.read(KEY, pages(bytes(4)))
