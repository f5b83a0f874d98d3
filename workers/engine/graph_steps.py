"""Times decode steps of a lone request on this worker's GPU, in CUDA graphs, as such steps are served, with other tiles.

Used by triton_kit.py, before there are requests (--tune full).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from meshlm.kernels.attention.tiles import SHORT_CONTEXT
from meshlm.kernels.measure import replay_us
from meshlm.kernels.precompile import precompiled
from meshlm.kernels.tuning.products import attempted
from meshlm.kernels.tuning.steps import Choice
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.engine.compute import Compute
from meshlm.workers.engine.together import cut_of
from meshlm.workers.engine.triton_inputs import TritonInputs, halves_of
from meshlm.workers.graphs.dispatcher import Recorder
from meshlm.workers.graphs.keys import HEAD, LONG, LONG_CONTEXT, MODEL, SHORT, Key
from meshlm.workers.output.logits_sampler import LogitsSampler
from meshlm.workers.rows.changes import NOTHING
from meshlm.workers.rows.step_columns import columns_of

if TYPE_CHECKING:
    from meshlm.workers.engine.engine import ModelEngine


CONTEXT = 576  # tokens of the request
TURNS, REPLAYS = 5, 20
KEY = Key(1, 1)


class TimedSteps:
    """See `meshlm.workers.cuda.tuning.TimedSteps`. The KV cache is there."""

    def __init__(
        self,
        engine: "ModelEngine",
        inputs: TritonInputs,
        padded: Callable[[Key], None],
        row: int | None = None,
        context: int = CONTEXT,
    ) -> None:
        """padded: launches the step of a graph. row: of the request, which has so many tokens; none: the dummy row, whose pages are
        all block 0, which must hold nothing yet."""
        self._engine, self._inputs, self._padded = engine, inputs, padded
        self._row = engine.rows.max_rows if row is None else row
        self._start = min(context, engine.resolved.max_model_len - 1)

    def __call__(self, choices: list[Choice], use: Callable[[Choice], None]) -> list[float]:
        """Medians, in turns."""
        with torch.inference_mode():
            step = columns_of(*(np.full(1, value, np.int32) for value in (self._row, self._start, 1)))
            self._inputs.send(step, 1, NOTHING, 0, np.arange(1))
            self._compile(choices, use)
            recorder = Recorder()
            graphs = [self._captured(recorder, choice, use) for choice in choices]
            turns = [
                [math.inf if graph is None else replay_us(graph, REPLAYS) for graph in graphs] for _ in range(TURNS)
            ]
            self._inputs.clear()
        return [sorted(times)[TURNS // 2] for times in zip(*turns, strict=True)]

    def _compile(self, choices: list[Choice], use: Callable[[Choice], None]) -> None:
        """Several kernels at a time, of so many layers as have them all."""
        compute = self._engine.compute
        caches = compute.caches
        try:
            with self._engine.model.shortened() as layers, precompiled():
                compute.caches = caches[:layers]
                for choice in choices:
                    use(choice)
                    self._launch()
        finally:
            compute.caches = caches

    def _captured(
        self, recorder: Recorder, choice: Choice, use: Callable[[Choice], None]
    ) -> torch.cuda.CUDAGraph | None:
        """None where a tile does not fit this GPU."""
        use(choice)
        self._launch()  # loads what a capture must not load
        return attempted(lambda: recorder.record(lambda: self._padded(KEY)), self._engine.device)

    def _launch(self) -> None:
        attempted(lambda: self._padded(KEY), self._engine.device)


class PaddedStep:
    """Launches it; as often as a graph is rehearsed, captured, or stood in for."""

    def __init__(self, compute: Compute, shard: Shard, inputs: TritonInputs, head: LogitsSampler) -> None:
        self._compute, self._shard, self._inputs, self._head = compute, shard, inputs, head

    def __call__(self, key: Key) -> None:
        if key.part == HEAD:
            rows, starts, ends, places = self._inputs.columns(key.requests)
            count = self._inputs.num_lines(key.requests)
            self._head.choose_kept(count, (rows, starts, ends), None if key.uniform else places[:count])
            return
        batch = self._inputs.padded(
            key.requests, key.tokens, shared=key.shared, verified=key.drafts, adapted=key.adapters
        )
        if key.contexts == LONG:
            batch = replace(batch, seen=LONG_CONTEXT)
        elif key.contexts == SHORT:
            batch = replace(batch, longest=SHORT_CONTEXT)
        hidden = self._compute.padded(batch, halves_of(batch, cut_of(key.tokens)) if key.halves else None)
        if self._shard.is_last:
            last = hidden if batch.logits_indices is None else hidden[batch.logits_indices]
            if key.part == MODEL:
                self._head.keep(last)
            else:
                self._head.choose(last, batch)
