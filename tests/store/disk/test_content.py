"""A file is what its name says, or it is found out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_bench import NAMESPACE, key

from meshlm.store.disk.content import HEADER_BYTES, BadFile, check, header_of, key_of, name_of

KEY = NAMESPACE + key(1)
PAGES = [memoryview(bytearray(b"abc")), memoryview(bytearray(b"def"))]


def test_what_was_written_is_taken() -> None:
    header = header_of(KEY, PAGES)
    assert len(header) == HEADER_BYTES
    check(KEY, header, PAGES)


@given(st.integers(0, HEADER_BYTES + 5), st.integers(1, 255))
def test_no_changed_byte_is_overlooked(place: int, change: int) -> None:
    header, pages = bytearray(header_of(KEY, PAGES)), [bytearray(page) for page in PAGES]
    if place < HEADER_BYTES:
        header[place] ^= change
    else:
        pages[(place - HEADER_BYTES) // 3][(place - HEADER_BYTES) % 3] ^= change
    with pytest.raises(BadFile, match=r"sum|foreign"):
        check(KEY, bytes(header), [memoryview(page) for page in pages])


@pytest.mark.parametrize(
    ("name", "pages", "why"),
    [
        (NAMESPACE + key(2), PAGES, "foreign"),
        (b"m" * 16 + key(1), PAGES, "foreign"),
        (KEY, [memoryview(b"abcdef")], "foreign"),
    ],
)
def test_another_keys_file_is_foreign(name: bytes, pages: list[memoryview], why: str) -> None:
    with pytest.raises(BadFile, match=why):
        check(name, header_of(KEY, PAGES), pages)


def test_a_header_that_is_cut_off_is_said() -> None:
    with pytest.raises(BadFile, match="truncated"):
        check(KEY, header_of(KEY, PAGES)[:-1], PAGES)


def test_names_lead_back_to_their_keys() -> None:
    parts = name_of(KEY).split("/")
    assert len(parts) == 3
    assert key_of(*parts) == KEY
    namespace, shard, name = parts
    others = [
        (namespace, shard, name.upper()),
        (namespace, "zz", name),
        (namespace[:-2], shard, name),
        ("x", shard, name),
    ]
    others += [
        (namespace, shard, name.removesuffix(".kv")),
        (namespace, shard, "README.md"),
        (namespace, shard, name + ".9.tmp"),
    ]
    assert [key_of(*one) for one in others] == [None] * len(others)
