"""What a process had in hand is known when it is dead, however it died."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.process import black_box, in_hand
from meshlm.runtime.process.black_box import BlackBox
from meshlm.runtime.process.in_hand import NUM_SLOTS, Left, hold, left_by, short

WORKER = Identity(Role.WORKER, 1)
DIES = """
import os, signal, sys, threading
from pathlib import Path
from meshlm.runtime.process import in_hand
from meshlm.runtime.process.black_box import BlackBox

in_hand.begin(BlackBox(Path(sys.argv[1]), 7))
in_hand.count(3)
with in_hand.hold("over"):
    pass
held = threading.Event()

def work():
    with in_hand.hold("in a thread"):
        held.set()
        threading.Event().wait()

threading.Thread(target=work, daemon=True).start()
held.wait()
with in_hand.hold("in the loop"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Path]:
    path = black_box.path_of(tmp_path, WORKER)
    in_hand.begin(BlackBox(path, 5))
    yield path
    in_hand._free.clear()
    in_hand._count.clear()


def test_a_killed_process_leaves_what_it_had(tmp_path: Path) -> None:
    path = black_box.path_of(tmp_path, WORKER)
    child = subprocess.run([sys.executable, "-P", "-c", DIES, str(path)], timeout=300, check=False)
    assert child.returncode == -signal.SIGKILL
    assert left_by(path, 7) == Left(("in a thread", "in the loop"), 3)
    assert left_by(path, 8) == Left(), "another incarnation's"
    assert left_by(tmp_path / "none", 7) == Left()


def test_nothing_is_in_hand_afterwards(box: Path) -> None:
    with hold("a"), hold("b"):
        assert left_by(box, 5).in_hand == ("a", "b")
    with pytest.raises(ZeroDivisionError):
        in_hand.holding("a", divmod, 1, 0)
    assert left_by(box, 5) == Left()


def test_long_names_and_many_at_a_time(box: Path) -> None:
    long = "é" * 300
    with hold(long):
        assert left_by(box, 5).in_hand == (short(long),)
        assert short(long) != short(long + "-1")
    holds = [hold(f"{number:03}") for number in range(NUM_SLOTS + 4)]
    for one in holds:
        one.__enter__()
    assert len(left_by(box, 5).in_hand) == NUM_SLOTS, "the rest are not noted, and no error"
    for one in holds:
        one.__exit__(None, None, None)
    assert left_by(box, 5) == Left()


def test_the_last_beat_and_what_is_in_hand_have_their_own_room(box: Path) -> None:
    with hold("x" * 63):
        in_hand.count(1 << 40)
        contents = black_box.read_file(box)
        assert contents.events == []
        assert left_by(box, 5) == Left(("x" * 63,), 0xFFFF_FFFF)
