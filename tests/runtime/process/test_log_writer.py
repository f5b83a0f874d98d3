"""Log lines whose reader is slow, stopped or gone hold nobody up."""

import json
import os
import socket
from collections.abc import Callable

import pytest

from meshlm.runtime.process import streams
from meshlm.runtime.process.streams import LogWriter

LIMIT_S = 20.0


def pipe() -> tuple[int, int]:
    return os.pipe()


def pair() -> tuple[int, int]:
    left, right = socket.socketpair()
    return left.detach(), right.detach()


def read_until(descriptor: int, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end):
        found += os.read(descriptor, 1 << 16)
    return found


@pytest.mark.parametrize("ends", [pipe, pair])
def test_nobody_waits_for_a_reader_that_has_stopped(ends: Callable[[], tuple[int, int]]) -> None:
    reading, writing = ends()
    writer = LogWriter(writing)
    for number in range(5000):  # more than the pipe holds
        print(f"{number:100}", file=writer, flush=True)
    lines = read_until(reading, b"4999\n").decode().splitlines()
    assert [int(line) for line in lines] == list(range(5000)), "none is lost, cut or out of order"
    writer.wait(LIMIT_S)
    print("after", file=writer)
    assert read_until(reading, b"after\n") == b"after\n"
    os.close(reading)
    print("nobody is there", file=writer)
    writer.close()
    os.close(writing)


@pytest.mark.parametrize(("line", "is_json"), [("text", False), ('{"event": "a line"}', True)])
def test_what_is_left_out_is_counted(line: str, is_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_WAITING_BYTES", 1000)
    reading, writing = os.pipe()
    writer = LogWriter(writing)
    for _ in range(100_000):  # more than the pipe and the memory hold
        print(line, file=writer)
    read = b""
    while b"in time" not in read:
        read += os.read(reading, 1 << 16)
    *lines, last = read.decode().splitlines()
    count = json.loads(last)["left_out"] if is_json else int(last.partition(" ")[0])
    assert set(lines) == {line}
    assert count + len(lines) == 100_000
    for descriptor in (reading, writing):
        os.close(descriptor)
    writer.close()


def test_those_who_share_the_pipe_wait_as_before() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(writing)
    print("a line", file=writer)
    assert os.get_blocking(writing)
    writer.close()
    os.close(reading)
    os.close(writing)
