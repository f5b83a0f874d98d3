"""What a process works on at this moment, in memory that outlives it: whoever finds it dead knows which requests it had in hand.

Each request that is handled has a slot of the process's black box for as long as that takes (`hold`, in any thread), and the box also
says how many requests the process has at all (`count`). A request that kills its process, by a crash of a library, by endless work
(then the supervisor kills it) or by taking all memory, is so told from those that were only there. The supervisor reads both
(`left_by`) and tells everybody (`Died.in_hand`). Where there is no black box nothing is noted.
"""

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from meshlm.protocol.wire.ids import Identity
from meshlm.runtime.process.black_box import HANDS, HANDS_BYTES, BlackBox, incarnation_in

Given = ParamSpec("Given")
Gives = TypeVar("Gives")
SLOT = 64  # bytes: a length and a name
NUM_SLOTS = HANDS_BYTES // SLOT - 1  # the first one is the count's
_free: deque[memoryview] = deque()
_count: list[memoryview] = []


class Left(NamedTuple):
    """What a dead process had."""

    in_hand: tuple[str, ...] = ()
    num_requests: int = 0


def short(name: str) -> str:
    """The name of a request as a slot holds it: clients may choose long ones."""
    data = name.encode("utf-8", "surrogatepass")
    return name if len(data) < SLOT else hashlib.blake2b(data, digest_size=16).hexdigest()


def question_name(asker: Identity, handle: int) -> str:
    """The name of a question to a detokenizer (/tokenize)."""
    return f"question {handle} of {asker}"


def begin(box: BlackBox) -> None:
    """Note in this box from now on."""
    _free.clear()
    _free.extend(box.hands[at : at + SLOT] for at in range(SLOT, SLOT * (NUM_SLOTS + 1), SLOT))
    _count[:] = [box.hands[:SLOT].cast("I")]


@contextlib.contextmanager
def hold(name: str) -> Iterator[None]:
    """Have this request in hand. With more than NUM_SLOTS at a time the rest are not noted."""
    try:
        slot = _free.pop()
    except IndexError:
        yield
        return
    data = short(name).encode("utf-8", "surrogatepass")
    slot[1 : 1 + len(data)] = data
    slot[0] = len(data)
    try:
        yield
    finally:
        slot[0] = 0
        _free.append(slot)


def holding(name: str, do: Callable[Given, Gives], *arguments: Given.args, **named: Given.kwargs) -> Gives:
    """What `do` gives, with this request in hand, if it has a name."""
    if not name:
        return do(*arguments, **named)
    with hold(name):
        return do(*arguments, **named)


def count(num_requests: int) -> None:
    """The process has so many requests, in hand or not."""
    for cell in _count:
        cell[0] = min(num_requests, 0xFFFF_FFFF)


def left_by(path: Path, incarnation: int) -> Left:
    """What this incarnation, which is dead, left in its black box; nothing where that cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return Left()
    try:
        if incarnation_in(file) != incarnation:
            return Left()
        data = os.pread(file, HANDS_BYTES, HANDS)
    except (OSError, ValueError):
        return Left()
    finally:
        os.close(file)
    slots = [data[at : at + SLOT] for at in range(SLOT, len(data), SLOT)]
    names = [slot[1 : 1 + slot[0]].decode("utf-8", "replace") for slot in slots if 0 < slot[0] < SLOT]
    return Left(tuple(sorted(set(names))), int.from_bytes(data[:4], "little"))
