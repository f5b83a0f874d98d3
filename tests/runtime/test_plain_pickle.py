"""Pickles of plain values are read and not run; whatever else they hold is refused."""

import ctypes
import importlib
from collections import OrderedDict
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

from meshlm.runtime.plain_pickle import Called, Named, NotPlain, read


def dumps(value: Any, protocol: int | None = None) -> bytes:
    """What a trainer does."""
    return bytes(ForkingPickler.dumps(value, protocol))


class Structure(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 4),)


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize(
    "value",
    [
        None, True, -1, 3, 300, 1 << 40, -(1 << 70), 0.5, "ä", "x" * 300, b"\x00" * 300, (), (1,), (1, 2, 3), (1, 2, 3, 4),
        [], [1], [1, (2, [3])], {}, {"a": 1}, {"a": [{"b": (b"c", None)}], "d": "a"},
    ],
)  # fmt: skip
def test_plain_values(value: object, protocol: int) -> None:
    assert read(dumps(value, protocol)) == value


def test_the_same_object_twice() -> None:
    one = ["a" * 10]
    assert read(dumps([one, one, "a" * 10])) == [one, one, "a" * 10]


def test_what_would_be_called_is_told() -> None:
    found = read(dumps(Structure((1, 2, 3, 4))))
    assert found == Called(
        Named("_ctypes", "_unpickle"), (Named(Structure.__module__, "Structure"), ({}, b"\x01\x02\x03\x04"))
    )
    assert read(dumps(len)) == Named("builtins", "len")


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        raise_it: Any = importlib.import_module("os").abort
        return raise_it, ()


def test_nothing_runs() -> None:
    assert read(dumps(Runs())).function.name == "abort", "this process is there"


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"\x80\x05", b"\x80\x05]", b"\x80\x05e.", b"\x80\x05]].", b"\x80\x05h\x07.", b"\x80\x05R.", dumps(OrderedDict(a=1)),
     dumps({1}), dumps(bytearray(b"x"), 5), b"\x80\x05]K\x01K\x02s.", dumps([1])[:-1], b"cos\nsystem\n(S'x'\ntR."],
)  # fmt: skip
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(NotPlain):
        read(data)
