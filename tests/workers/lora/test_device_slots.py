"""The slots of a GPU's memory: what waits is brought there ahead, what rows use stays where it is, and the least needed goes."""

import threading
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from meshlm.kernels.lora.layout import LINE, NUMBERS, Packed
from meshlm.protocol.adapters import Adapter
from meshlm.workers.lora import device_slots
from meshlm.workers.lora.device_slots import DeviceSlots
from meshlm.workers.lora.side_stream import Done
from meshlm.workers.lora.weights import LoadedAdapter

WAIT_S = 60


class Layout:
    """Of one matrix."""

    num_values, num_matrices, max_rank = 2 * LINE, 1, 8

    def shapes(self) -> list[Any]:
        return []


class Copies:
    """A stream whose copies a test may hold up."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.num_copies, self.waited_for = 0, list[Any]()
        self._marks = iter(range(1, 100))

    def mark(self) -> int:
        return next(self._marks)

    def wait_for(self, mark: Any) -> None:
        self.waited_for.append(mark)

    def copy(self, values: torch.Tensor, to: torch.Tensor) -> Done:
        self.begun.set()
        assert self.may_end.wait(WAIT_S)
        self.num_copies += 1
        to.flatten()[: values.numel()].copy_(values.flatten())
        return Done()


def adapter(name: str) -> LoadedAdapter:
    values = torch.full((2 * LINE,), float(ord(name)))
    return LoadedAdapter(
        Adapter(name, f"/{name}", name.encode() * 32), {}, packed=Packed(values, torch.tensor([[0, LINE, LINE]]))
    )


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    found = Copies()
    monkeypatch.setattr(device_slots, "side_stream_of", lambda device: found)
    return found


def slots_of(max_loras: int) -> DeviceSlots:
    layout: Any = Layout()
    return DeviceSlots(layout, max_loras, torch.float32, torch.device("cpu"))


def check(slots: DeviceSlots, number: int, name: str) -> None:
    """What a kernel finds for this slot is that adapter's."""
    a, b, rank = slots.memory.places[number, 0].tolist()
    assert (a, b - a, rank) == (number * 2 * LINE, LINE, LINE)
    assert slots.memory.values[a : a + 2 * LINE].tolist() == [float(ord(name))] * 2 * LINE
    assert slots.memory.places.shape == (slots.count, 1, NUMBERS)


def test_one_that_waits_is_there_before_its_row(copies: Copies) -> None:
    slots = slots_of(1)
    first = slots.take(adapter("a"))
    slots.prepare(adapter("b"))
    assert copies.num_copies == 4, "values and places of two"
    slots.prepare(adapter("b"))
    slots.leave(first)
    number = slots.take(adapter("b"))
    assert copies.num_copies == 4
    assert number != first
    check(slots, number, "b")
    check(slots, first, "a")


def test_the_slot_of_one_that_has_gone_is_kept_until_it_is_needed(copies: Copies) -> None:
    slots = slots_of(2)
    a = slots.take(adapter("a"))
    slots.leave(a)
    assert slots.take(adapter("a")) == a
    assert copies.num_copies == 2
    slots.leave(a)
    b, c = slots.take(adapter("b")), slots.take(adapter("c"))
    slots.leave(b)
    slots.leave(c)
    assert slots.take(adapter("d")) == a, "it was used first"
    check(slots, a, "d")
    assert copies.waited_for[-1] == 2, "the steps that read it last"


def test_what_waits_is_not_pushed_out_by_what_comes_later(copies: Copies) -> None:
    slots = slots_of(1)
    slots.take(adapter("a"))
    slots.prepare(adapter("b"))
    before = copies.num_copies
    slots.prepare(adapter("c"))
    assert copies.num_copies == before
    slots.leave(0)
    check(slots, slots.take(adapter("b")), "b")
    assert copies.num_copies == before
    slots.leave(1)
    slots.prepare(adapter("e"))  # whose request never comes
    for name in "fgh":
        slots.leave(slots.take(adapter(name)))
    slots.prepare(adapter("i"))
    assert copies.num_copies > before
    check(slots, slots.take(adapter("i")), "i")


def test_a_row_waits_for_the_copy_of_its_adapter(copies: Copies) -> None:
    slots = slots_of(1)
    copies.may_end.clear()
    loader = threading.Thread(target=slots.prepare, args=(adapter("a"),))
    loader.start()
    assert copies.begun.wait(WAIT_S)
    taken: list[int] = []
    stepper = threading.Thread(target=lambda: taken.append(slots.take(adapter("a"))))
    stepper.start()
    assert slots._slot_for(b"b" * 32) is slots._slots[1], "a slot that is written is nobody's"
    copies.may_end.set()
    for thread in (loader, stepper):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert taken == [0]
    assert copies.num_copies == 2
    check(slots, 0, "a")


def test_a_copy_that_fails_leaves_the_slot_free(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = slots_of(1)
    copy = copies.copy

    def fails(values: torch.Tensor, to: torch.Tensor) -> Done:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(copies, "copy", fails)
    with pytest.raises(RuntimeError, match="CUDA error"):
        slots.prepare(adapter("a"))
    monkeypatch.setattr(copies, "copy", copy)
    check(slots, slots.take(adapter("a")), "a")


def test_a_dropped_one_is_forgotten_once_no_row_has_it(copies: Copies) -> None:
    slots = slots_of(1)
    a = slots.take(adapter("a"))
    slots.drop(adapter("a").adapter.digest)
    check(slots, a, "a")
    slots.leave(a)
    slots.drop(adapter("a").adapter.digest)
    assert not any(slot.digest for slot in slots._slots)


def test_nothing_is_written_while_it_sleeps(copies: Copies) -> None:
    slots = slots_of(1)
    slots.sleep(awake=False)
    slots.prepare(adapter("a"))
    assert copies.num_copies == 0
    slots.sleep(awake=True)
    slots.prepare(adapter("a"))
    assert copies.num_copies == 2
