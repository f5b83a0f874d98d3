"""Rows whose repetitions end at certain tokens (DRY): a bit for each token, in a buffer that is always on the device."""

import numpy as np
import torch
from torch import Tensor

from meshlm.protocol.edges.step import NewRow
from meshlm.protocol.extras import find_extra
from meshlm.protocol.samplers import SequenceBreakers
from meshlm.workers.output.sampler import put
from meshlm.workers.rows.extras.extra import RowExtra


def breakers_buffer(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """int32 [rows, words]: token t is a sequence breaker of a row where bit t % 32 of word t / 32 is set."""
    return torch.zeros(num_rows, -(-vocab_size // 32), dtype=torch.int32, device=device)


class SequenceBreakersRows(RowExtra[Tensor]):
    """See `RowExtra`."""

    extra = SequenceBreakers

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def add_row(self, new: NewRow) -> None:
        breakers = find_extra(new.extras, SequenceBreakers)
        assert breakers is not None
        bits = np.zeros(self._buffer.shape[1] * 32, np.uint8)
        bits[np.frombuffer(breakers.token_ids, np.int32)] = 1
        self._buffer[new.row] = put(np.packbits(bits, bitorder="little").view(np.int32), self._buffer.device)

    def remove_row(self, row: int) -> None:
        self._buffer[row] = 0
