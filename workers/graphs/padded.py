"""A step padded to the shape of a CUDA graph: what a graph captures, from the columns that were sent to the sampled tokens.

The same launches for each step that fits, whatever its requests. Used by the dispatcher.
"""

from dataclasses import replace

from meshlm.kernels.attention.tiles import SHORT_CONTEXT
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.engine.compute import Compute
from meshlm.workers.engine.micro_batches import cut_of
from meshlm.workers.engine.triton_inputs import TritonInputs, halves_of
from meshlm.workers.graphs.dispatcher import HEAD, LONG, MODEL, SHORT, Key
from meshlm.workers.graphs.step_time import LONG_CONTEXT
from meshlm.workers.output.logits_sampler import LogitsSampler


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
        batch = self._inputs.padded(key.requests, key.tokens, shared=key.shared)
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
