"""How a decode step is timed with other tiles; what a GPU would do is made up."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from meshlm.workers.engine import graph_steps
from meshlm.workers.engine.graph_steps import CONTEXT, KEY, TURNS, TimedSteps
from meshlm.workers.graphs.keys import Key
from meshlm.workers.rows.step_columns import StepColumns

FITS, LARGE = {"qkv": (1, 4, 3, 2)}, {"qkv": (64, 4, 6, 2)}


class Gpu:
    """Two graphs, of which the second is for tiles that have no room; times come from a list."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: list[float], length: int) -> None:
        self.chosen: Any = None
        self.layers: list[int] = []  # of each launch
        self.sent: list[tuple[StepColumns, int]] = []
        self.cleared = 0
        left = iter(times)
        monkeypatch.setattr(graph_steps, "precompiled", nullcontext)
        monkeypatch.setattr(graph_steps, "replay_us", lambda graph, repeats: next(left))
        monkeypatch.setattr(graph_steps, "Recorder", lambda: SimpleNamespace(record=self.record))
        self.compute = SimpleNamespace(caches=[0, 1, 2])
        self.engine: Any = SimpleNamespace(
            resolved=SimpleNamespace(max_model_len=length), rows=SimpleNamespace(max_rows=16), compute=self.compute,
            model=SimpleNamespace(shortened=self.shortened), device=torch.device("cpu"),
        )  # fmt: skip
        self.inputs: Any = SimpleNamespace(send=lambda step, size, *_: self.sent.append((step, size)), clear=self.clear)

    @contextmanager
    def shortened(self) -> Iterator[int]:
        yield 2

    def record(self, launch: Callable[[], None]) -> object:
        launch()
        return object()

    def clear(self) -> None:
        self.cleared += 1

    def launch(self, key: Key) -> None:
        assert key == KEY
        self.layers.append(len(self.compute.caches))
        if self.chosen is LARGE:
            raise RuntimeError("out of shared memory")

    def use(self, choice: Any) -> None:
        self.chosen = choice


@pytest.mark.parametrize(
    ("length", "request_", "row", "context"),
    [(4096, (), 16, CONTEXT), (100, (), 16, 99), (4096, (0, 700), 0, 700)],
    ids=["dummy row", "short model", "a request of its own"],
)
def test_medians_of_turns(
    monkeypatch: pytest.MonkeyPatch, length: int, request_: tuple[int, ...], row: int, context: int
) -> None:
    gpu = Gpu(monkeypatch, [9.0, 5.0, 7.0, 8.0, 6.0], length)
    assert TURNS == 5
    assert TimedSteps(gpu.engine, gpu.inputs, gpu.launch, *request_)([FITS, LARGE], gpu.use) == [7.0, math.inf]
    ((step, size),) = gpu.sent
    assert (size, step.n, step.t, step.rows.tolist(), step.starts.tolist()) == (1, 1, 1, [row], [context])
    assert gpu.layers == [2, 2, 3, 3, 3, 3], "compiled of some layers, then launched and captured whole"
    assert gpu.compute.caches == [0, 1, 2]
    assert gpu.cleared == 1
