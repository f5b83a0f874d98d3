"""From a step's columns on the device to its sampled tokens there, launched one by one. Nothing here waits for the device.

Owned by the engine, which sends the columns first (kit.py) and fetches the tokens afterwards. A CUDA graph captures the same with
another shape (engine/graph_steps.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshlm.workers.attention.backend import Backend
from meshlm.workers.attention.uncut import UncutAttention
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.engine.kit import TorchInputs
from meshlm.workers.engine.together import Turns
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.output.sampler import TorchHead
from meshlm.workers.rows.extras.extra import StepExtra
from meshlm.workers.rows.step_columns import StepColumns

if TYPE_CHECKING:
    from meshlm.workers.engine.triton_inputs import TritonInputs
    from meshlm.workers.lora.step_adapters import StepAdapters
    from meshlm.workers.output.logits_sampler import LogitsSampler


class Compute:
    """This worker's part of the model, and the head where it is the last part. `caches`: none until the engine has made them."""

    def __init__(
        self,
        model: Decoder,
        attention: Backend,
        block_size: int,
        shard: Shard,
        inputs: "TorchInputs | TritonInputs",
        head: "TorchHead | LogitsSampler",
        intermediate_tensors: Tensor,
    ) -> None:
        """intermediate_tensors [t, hidden]: a stage finds here what the one before passes on, and leaves what the next one takes."""
        self._num_layers = len(model.local.layers)  # the caches behind theirs are a drafter's
        self._model, self._block_size, self._is_first = model, block_size, shard.is_first
        self._is_last = shard.is_last
        self._inputs, self._head, self._intermediate_tensors = inputs, head, intermediate_tensors
        self.attention = attention
        self.caches: list[LayerCache] = []
        self._adapters: StepAdapters | None = None  # of the last step
        self.turns: Turns | None = None  # of halves of steps, where tokens travel
        self.last_states = torch.empty(0)  # [most, hidden], where they are read after a step: of its tokens

    def eager(self, step: StepColumns, cut: int = 0, extras: Sequence[StepExtra[Tensor]] = ()) -> Tensor:
        """A step as it is; hidden states of all its tokens. cut: tokens of its first half, if halves take turns. extras: of its rows,
        which are asked before the head."""
        batch = self._inputs.of_step(step)
        hidden = self.by_turns(self._inputs.halves(step, batch, cut)) if cut else self.forward(batch)
        if self._is_last and len(step.places):
            for extra in extras:
                extra.before_head(self._head)
            self._head.sample(hidden[batch.logits_indices], batch, step)
        return hidden

    def padded(self, batch: StepInputs, halves: tuple[StepInputs, StepInputs] | None) -> Tensor:
        """A step of a CUDA graph, whose shape is that of all ranks that step together."""
        if halves is not None:
            return self.by_turns(halves)
        if self.turns is not None:
            self.turns.experts.num_tokens = len(batch.input_ids)
        return self.forward(batch)

    def by_turns(self, halves: tuple[StepInputs, StepInputs]) -> Tensor:
        """Both halves of a step, one computing while the other's tokens travel; hidden states of all tokens."""
        assert self.turns is not None
        self.turns.experts.num_tokens = len(halves[0].input_ids)
        return torch.cat(self.turns.run([partial(self.forward, half) for half in halves]))

    def idle(self) -> None:
        """A step without tokens, of a rank that steps together with others: its experts compute what the others send, if any does."""
        if self.turns is not None and self.turns.experts.num_tokens:
            self._model.idle()

    def forward(self, batch: StepInputs) -> Tensor:
        """This stage's layers; what it passes on is in the intermediate tensors afterwards."""
        intermediate_tensors = self._intermediate_tensors[: len(batch.input_ids)]
        attention = self.attention.step(batch, self._block_size)
        if batch.uncut:
            media = self._model.spec.media
            in_windows = media is not None and media.uncut_in_windows
            attention = UncutAttention(attention, batch, self._block_size, in_windows)
        caches = self.caches[: self._num_layers]
        hidden: Tensor = self._model(batch, caches, attention, None if self._is_first else intermediate_tensors)
        self._adapters = batch.adapters
        if batch.adapters is not None:
            batch.adapters.check(is_first=self._is_first)
        if not self._is_last:
            intermediate_tensors.copy_(hidden)
        if len(self.last_states):
            self.last_states[: len(hidden)].copy_(hidden)
        return hidden

    def logits_of(self, begin: int, end: int) -> Callable[[Tensor], Tensor]:
        """What gives the logits [l, vocab] of the hidden states of these tokens of the last step, with their adapters."""
        adapters = self._adapters
        lines = (
            None
            if adapters is None
            else adapters.of_lines(torch.arange(begin, end, device=self._intermediate_tensors.device))
        )
        return self._model.logits if lines is None else partial(lines.logits, self._model)
