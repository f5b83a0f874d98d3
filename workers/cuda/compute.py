"""From a step's columns on the GPU to its sampled tokens there: what a CUDA graph captures, and the same launched kernel by kernel.

Owned by the engine, which sends the columns first (inbox.py) and fetches the tokens afterwards. Nothing here waits for the device.
"""

import numpy as np
import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.prepare_inputs.kernel import prepare_inputs
from meshlm.workers.attention.backend import Backend
from meshlm.workers.batch import UNKNOWN, ForwardBatch, LayerCache
from meshlm.workers.cuda.columns import Columns32
from meshlm.workers.cuda.graphs import Key
from meshlm.workers.cuda.inbox import Inbox
from meshlm.workers.cuda.logits_sampler import LogitsSampler
from meshlm.workers.cuda.state import DeviceRows, aligned
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.models.decoder import Decoder


class Compute:
    """This worker's part of the model, and the head where it is the last part. `caches`: none until the engine has made them."""

    def __init__(
        self,
        model: Decoder,
        attention: Backend,
        shard: Shard,
        rows: DeviceRows,
        inbox: Inbox,
        head: LogitsSampler,
        stream: Tensor,
    ) -> None:
        """stream [t, hidden]: where a stage finds what the one before passes on, and leaves what the next one takes."""
        self._model, self._attention, self._shard = model, attention, shard
        self._rows, self._inbox, self._head, self._stream = rows, inbox, head, stream
        self.caches: list[LayerCache] = []

    def padded(self, key: Key) -> None:
        """A step padded to the shape of a graph, the same launches for each that fits."""
        rows, starts, ends, places = self._inbox.columns(key.requests)
        hidden = self._forward(self._batch(key.requests, key.tokens, key.requests if key.uniform else UNKNOWN))
        if not self._shard.is_last:
            return
        if key.uniform:
            self._head.choose(hidden, (rows, starts, ends), None)
            return
        places = places[: self._rows.max_rows]  # there may be one request more, which is padding
        last = (ends[places.long()].long() - 1).clamp_(min=0)
        self._head.choose(hidden[last], (rows, starts, ends), places)

    def eager(self, step: Columns32) -> Tensor:
        """A step as it is; hidden states of all its tokens."""
        num_decodes = int(np.argmin(step.counts == 1)) if (step.counts != 1).any() else step.n
        hidden = self._forward(self._batch(step.n, step.t, num_decodes))
        count = step.n if step.samples is None else int(step.samples.sum())
        if count and self._shard.is_last:
            rows, starts, ends, places = self._inbox.columns(step.n)
            places = places[:count]
            last = ends[places.long()].long() - 1
            self._head.choose(hidden[last], (rows, starts, ends), places)
        return hidden

    def _batch(self, size: int, tokens: int, num_decodes: int) -> ForwardBatch:
        """Of `size` requests with `tokens` tokens, padding included."""
        rows, starts, ends, _ = self._inbox.columns(size)
        tables, block_size = self._rows.blocks, self._rows.block_size
        ids = torch.empty(3, aligned(tokens), dtype=torch.int64, device=tables.device)
        input_ids, positions, slots = (line[:tokens] for line in ids)
        prepare_inputs(rows, starts, ends, size, self._rows.tokens, tables, block_size, (input_ids, positions, slots))
        return ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slots,
            block_tables=tables,
            seq_lens=ends,
            logits_indices=ends,
            num_decodes=num_decodes,
            query_lens=(),
            context_lens=(),
            max_decode_len=0,
            columns=Columns(rows, starts, ends, size, tables),
        )

    def _forward(self, batch: ForwardBatch) -> Tensor:
        """This stage's part of the model; what it passes on is in the stream afterwards."""
        stream = self._stream[: len(batch.input_ids)]
        attention = self._attention.step(batch, self._rows.block_size)
        hidden: Tensor = self._model(batch, self.caches, attention, None if self._shard.is_first else stream)
        if not self._shard.is_last:
            stream.copy_(hidden)
        return hidden
