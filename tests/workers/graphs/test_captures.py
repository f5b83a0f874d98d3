"""Captures that fail: counted, dropped, agreed upon in a group; only a GPU that has failed ends the process. torch's part is faked."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
import torch

from meshlm.workers.graphs.dispatcher import PATIENCE_DECODES, PATIENCE_SHARED, Captures, Dispatcher
from meshlm.workers.graphs.keys import HEAD, MODEL, Key

KEYS = [Key(1, 1), Key(2, 2), Key(4, 4), Key(128, 5)]


class Gpu:
    """What a step does (`fail`, by key and whether it is being captured), and what torch's allocator would say."""

    def __init__(self) -> None:
        self.fail: dict[tuple[Key, bool], list[Exception]] = {}
        self.dead = self.capturing = self.invalid = False
        self.pools = 0
        self.recording: Any = None  # the pool of a capture that goes on, or could not be ended
        self.ran: list[Key] = []
        self.captured: list[Key] = []

    def step(self, key: Key) -> None:
        errors = self.fail.get((key, self.capturing), [])
        if errors:
            self.invalid = self.capturing
            raise errors.pop(0)
        (self.captured if self.capturing else self.ran).append(key)

    def synchronize(self) -> None:
        if self.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def pool(self) -> int:
        self.pools += 1
        return self.pools

    def end_allocate(self, device: int, pool: int) -> None:
        assert self.recording == pool
        self.recording = None


class Graph:
    gpu: Gpu

    def replay(self) -> None:
        """What was captured is not run."""

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        if self.gpu.recording is not None:
            raise RuntimeError("already recording")
        self.gpu.recording, self.gpu.capturing, self.gpu.invalid = pool, True, False

    def capture_end(self) -> None:
        self.gpu.capturing = False
        if self.gpu.invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.gpu.recording = None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    monkeypatch.setattr(Graph, "gpu", made, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", made.pool)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_allocate, raising=False)
    yield made
    assert made.recording is None


def errors(count: int) -> list[Exception]:
    return [RuntimeError(f"failure {nth}\nand more of it") for nth in range(count)]


def in_idle_time(steps: Dispatcher) -> None:
    for _ in KEYS:
        steps.background()


def test_what_fails_twice_is_dropped_and_said_once(gpu: Gpu) -> None:
    """In idle time: all others are captured, and the next larger one does."""
    gpu.fail = {(Key(2, 2), True): errors(2)}
    steps = Dispatcher(list(KEYS), gpu.step)
    with structlog.testing.capture_logs() as logs:
        in_idle_time(steps)
        in_idle_time(steps)
    assert steps.complete
    assert sorted(gpu.captured) == [Key(1, 1), Key(4, 4), Key(128, 5)]
    assert dict(steps.misses) == {"capture_failed": 1}
    assert [(log["tokens"], log["reason"]) for log in logs] == [(2, "RuntimeError: failure 1")]
    assert steps.find(2, 2, uniform=True) == Key(4, 4)


def test_what_fails_once_is_captured_in_another_pool(gpu: Gpu) -> None:
    """The first pool has graphs already; torch would refuse to record to it."""
    gpu.fail = {(Key(2, 2), True): errors(1)}
    steps = Dispatcher(list(KEYS), gpu.step)
    in_idle_time(steps)
    assert steps.complete
    assert sorted(gpu.captured) == sorted(KEYS)
    assert dict(steps.misses) == {"rehearsed": 1}
    assert gpu.pools == 2


@pytest.mark.parametrize("key", [Key(4, 4), Key(1, 1)])
def test_a_step_that_cannot_even_be_launched_ends_nothing_in_idle_time(gpu: Gpu, key: Key) -> None:
    """The first of its kind is launched by hand before any capture."""
    gpu.fail = {(key, True): errors(9), (key, False): errors(9)}
    steps = Dispatcher(list(KEYS), gpu.step)
    in_idle_time(steps)
    assert steps.complete
    assert key not in steps.keys
    assert steps.misses["capture_failed"] == 1


def test_a_request_whose_graph_fails_is_answered_by_hand(gpu: Gpu) -> None:
    gpu.fail = {(Key(2, 2), True): errors(2)}
    steps = Dispatcher(list(KEYS), gpu.step)
    key = steps.find(2, 2, uniform=True)
    assert key == Key(2, 2)
    steps.prepare(key)
    gpu.ran.clear()
    steps.replay(key)
    assert gpu.ran == [Key(2, 2)]
    assert not steps.replays
    assert dict(steps.misses) == {"captured_now": 1, "capture_failed": 1}


@pytest.mark.parametrize("eager", [False, True])
def test_a_gpu_that_has_failed_is_not_survived(gpu: Gpu, eager: bool) -> None:
    gpu.dead = True
    gpu.fail = {(Key(4, 4), not eager): errors(1)}
    steps = Dispatcher(list(KEYS), gpu.step)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        steps.background()
    assert "capture_failed" not in steps.misses


def test_a_group_has_the_graphs_that_all_ranks_have(gpu: Gpu) -> None:
    """Another rank fails twice for one key, once for another: this one tries again with it, and drops the same."""
    others = {Key(4, 4): [False, False], Key(2, 2): [False, True]}
    said: list[bool] = []

    def agree(worked: bool) -> bool:
        said.append(worked)
        answers = others.get(gpu.captured[-1], [])
        return answers.pop(0) if answers else worked

    steps = Dispatcher(list(KEYS), gpu.step, agree)
    with structlog.testing.capture_logs() as logs:
        in_idle_time(steps)
    assert said == [True] * 6
    assert steps.complete
    assert steps.keys == [Key(1, 1), Key(2, 2), Key(128, 5)]
    assert [log["reason"] for log in logs] == ["it failed on another rank"]


def test_a_rank_whose_step_fails_leaves_its_group(gpu: Gpu) -> None:
    """The others wait in the midst of that step: nobody can ask them."""
    gpu.fail = {(Key(4, 4), False): errors(1)}
    steps = Dispatcher(list(KEYS), gpu.step, lambda worked: worked)
    with pytest.raises(RuntimeError, match="failure 0"):
        steps.background()


def test_ranks_that_step_together_have_the_first_graphs_when_they_meet(gpu: Gpu) -> None:
    """The others are captured in a step that asks for them, on all ranks; none may do without for want of memory."""
    keys = [Key(1, 1), Key(2, 2), Key(3, 3), Key(4, 4), Key(128, 5)]
    said: list[bool] = []

    def agree(worked: bool) -> bool:
        said.append(worked)
        return worked

    steps = Dispatcher(keys, gpu.step, agree)
    Captures(steps, lambda: None).together(everything=False)
    assert set(gpu.captured) == {Key(1, 1), Key(2, 2), Key(4, 4), Key(128, 5)}
    found = [steps.find(3, 3, uniform=True) for _ in range(PATIENCE_DECODES + 1)]
    assert found == [Key(4, 4)] * PATIENCE_DECODES + [Key(3, 3)]
    gpu.fail = {(Key(3, 3), True): [torch.OutOfMemoryError("full")]}
    with pytest.raises(torch.OutOfMemoryError):
        steps.prepare(Key(3, 3))
    steps.prepare(Key(3, 3))
    assert gpu.captured[-1] == Key(3, 3)
    assert said == [True] * 5


def test_the_parts_of_a_step_are_graphs_of_their_own(gpu: Gpu) -> None:
    """Captured when they are asked for, counted as one step, and no part of what is to be captured in idle time."""
    steps = Dispatcher(list(KEYS), gpu.step)
    model, head = Key(2, 2, part=MODEL), Key(2, 2, part=HEAD)
    for part in (model, head):
        steps.prepare(part)
        steps.prepare(part)
    assert gpu.captured == [model, head]
    assert gpu.ran == [model, head], "the first of each kind is rehearsed"
    assert not steps.complete
    for part in (model, head):
        steps.replay(part)
    assert dict(steps.replays) == {"decode": 1}
    in_idle_time(steps)
    assert steps.complete


def test_a_part_that_cannot_be_captured_is_launched_by_hand(gpu: Gpu) -> None:
    head = Key(2, 2, part=HEAD)
    gpu.fail = {(head, True): errors(2)}
    steps = Dispatcher(list(KEYS), gpu.step)
    for _ in range(3):
        steps.prepare(head)
    assert steps.misses["captured_now"] == 1
    assert steps.keys == KEYS
    gpu.ran.clear()
    steps.replay(head)
    assert gpu.ran == [head]


def test_a_shared_graph_that_cannot_be_captured_leaves_the_plain_one(gpu: Gpu) -> None:
    shared = Key(4, 4, shared=True)
    gpu.fail = {(shared, True): errors(2)}
    steps = Dispatcher(list(KEYS), gpu.step)
    in_idle_time(steps)
    found = [steps.find(4, 4, uniform=True, shared=True) for _ in range(PATIENCE_SHARED + 1)]
    assert found == [Key(4, 4)] * PATIENCE_SHARED + [shared]
    steps.prepare(shared)
    steps.replay(shared)
    assert gpu.ran[-1] == shared
    assert steps.keys == KEYS
    assert steps.find(4, 4, uniform=True, shared=True) == Key(4, 4)
    other = Key(2, 2, shared=True)
    for _ in range(PATIENCE_SHARED + 1):
        assert (key := steps.find(2, 2, uniform=True, shared=True)) is not None
    assert key == other
    steps.prepare(other)
    steps.replay(other)
    assert dict(steps.replays) == {"decode_shared": 1}
