"""The file of API keys: what its lines mean, which are refused, and what holds while it cannot be read."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.protocol.config import ServerConfig
from meshlm.runtime.api_keys import (
    ADMIN,
    INFERENCE,
    MAX_FILE_BYTES,
    SCOPES,
    ApiKey,
    ApiKeys,
    KeyFileError,
    Limits,
    read_file,
)


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# all of us\n\none\ntwo admin\nthree\tinference,admin # both\n  four inference\n")
    assert read_file(str(path)) == (
        ApiKey(b"one", frozenset((INFERENCE,))),
        ApiKey(b"two", frozenset((ADMIN,))),
        ApiKey(b"three", SCOPES),
        ApiKey(b"four", frozenset((INFERENCE,))),
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", ": there is no key"),
        (b"# one\n", ": there is no key"),
        (b"a\nsecret admin now", ", line 2: a key and its scopes are expected"),
        (b"secret rpm=", ", line 1: limits are rpm=N"),
        (b"secret admin rpm=0", ", line 1: limits are rpm=N"),
        (b"secret tpm=5 tpm=6", ", line 1: limits are rpm=N"),
        (b"secret cats=5", ", line 1: limits are rpm=N"),
        (b"secret rpm=99999999999999999999999", ", line 1: limits are rpm=N"),
        (b"secret root", ", line 1: scopes are admin and inference"),
        (b"secret inference,", ", line 1: scopes are admin and inference"),
        (b"secret\nb\nsecret admin", ", line 3: this key stands there twice"),
        (b"s\xff", ", line 1: a key is made of printable ASCII"),
        (b"x" * (MAX_FILE_BYTES + 1), ": it has more than"),
    ],
)
def test_what_is_refused_is_said_without_the_key(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(data)
    with pytest.raises(KeyFileError) as told:
        read_file(str(path))
    assert str(told.value).startswith(f"--api-key-file {path}{says}")
    assert "secret" not in str(told.value)


@given(st.binary(max_size=60))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "keys-of-chance"
    path.write_bytes(data)
    try:
        found = read_file(str(path))
    except KeyFileError:
        return
    assert found
    assert all(one.key and one.scopes <= SCOPES and one.scopes for one in found)


def test_the_keys_before_hold_until_the_file_is_good_again(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one")
    keys = ApiKeys(("flag",), str(path))
    assert keys
    assert keys.find([b"flag"]) == ApiKey(b"flag", SCOPES)
    path.write_text("two three four")
    with pytest.raises(KeyFileError):
        keys.read_again()
    assert keys.find([b"", b"one"]) == ApiKey(b"one", frozenset((INFERENCE,)))
    path.write_text("two")
    keys.read_again()
    assert keys.find([b"one"]) is None
    assert keys.find([b"two"]) is not None


def test_a_file_that_is_not_there_opens_nothing(tmp_path: Path) -> None:
    """A frontend that starts anew beside a bad file serves who has another key, and nobody without."""
    keys = ApiKeys((), str(tmp_path / "none"))
    assert keys, "a key is asked for"
    assert "No such file" in keys.problem
    assert keys.find([b"", b"one"]) is None
    assert not ApiKeys((), "")


def test_limits_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one rpm=60\na=b admin tpm=1000 rpm=5\nthree tpm=7 inference\n")
    assert [(key.key, key.scopes, key.limits) for key in read_file(str(path))] == [
        (b"one", frozenset((INFERENCE,)), Limits(rpm=60)),
        (b"a=b", frozenset((ADMIN,)), Limits(rpm=5, tpm=1000)),
        (b"three", frozenset((INFERENCE,)), Limits(tpm=7)),
    ]


def test_keys_for_admin_take_admin_from_the_others() -> None:
    keys = ApiKeys(("one",), "", ("root",), admin_is_open=True)
    assert keys.find([b"one"]) == ApiKey(b"one", frozenset((INFERENCE,)))
    assert keys.find([b"root"]) == ApiKey(b"root", SCOPES)
    assert keys.asks_for(ADMIN)
    assert keys.asks_for(INFERENCE)
    alone = ApiKeys((), "", ("root",), admin_is_open=True)
    assert not alone
    assert alone.asks_for(ADMIN)
    assert not alone.asks_for(INFERENCE)


def test_without_a_key_admin_is_for_this_host() -> None:
    assert not ApiKeys.of_server(ServerConfig()).asks_for(ADMIN)
    assert ApiKeys.of_server(ServerConfig(host="0.0.0.0")).asks_for(ADMIN)
    assert not ApiKeys.of_server(ServerConfig(host="0.0.0.0")).asks_for(INFERENCE)
