"""What a node waits for before it starts anything. No head, and no name server."""

import io
import socket
import time
from typing import Any

import pytest

from meshlm.supervisor.cli.display import StartDisplay
from meshlm.supervisor.errors import StartError
from meshlm.supervisor.nodes import joining

JOIN = "tcp://head-0.mesh:5600"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, which goes on only where the code sleeps."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    return clock


def known_at(at: float, now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's name leads somewhere from then on."""

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("head-0.mesh", 5600)
        if now[0] < at:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_name_may_come_later_than_its_node(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts and their names come in any order, such as pods and their entries in a cluster's name service."""
    known_at(115.0, now, monkeypatch)
    out = io.StringIO()
    joining.wait_for_name(JOIN, 160.0, StartDisplay(out))
    assert 115.0 <= now[0] < 116.0
    said = out.getvalue().splitlines()
    assert len(said) == 2, "after one second, and ten later"
    assert all(f"waiting for the head {JOIN}: head-0.mesh: Name or service not known" in line for line in said)


def test_a_name_that_never_comes_is_an_error_that_has_the_flag(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    known_at(1e9, now, monkeypatch)
    with pytest.raises(StartError, match=rf"^--join {JOIN}: head-0.mesh: Name .* known, until --startup-timeout$"):
        joining.wait_for_name(JOIN, 103.0, StartDisplay())
    assert now[0] == pytest.approx(103.0)
