"""The logits processors of one worker, and which rows they process. Owned by the engine's rows, used by the sampler."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.step import NewRow
from meshlm.runtime import logits_processors
from meshlm.workers.output.logits_processor import AddedRequest, BatchUpdate, LogitsBatch, LogitsProcessor
from meshlm.workers.output.timestamp_rules import TimestampRules
from meshlm.workers.rows.columns import ALWAYS
from meshlm.workers.rows.extras.extra import RowExtra


class _Used:
    """One processor: its rows, and what it has not been told of."""

    def __init__(self, processor: LogitsProcessor, max_rows: int) -> None:
        self.processor, self.is_invariant = processor, processor.is_argmax_invariant()
        self.has = np.zeros(max_rows + 1, np.bool_)  # and the row of padding
        self._removed: list[int] = []
        self._added: dict[int, AddedRequest] = {}

    def add_row(self, added: AddedRequest) -> None:
        if self.processor.wants(added.params):
            self.has[added.row] = True
            self._added[added.row] = added

    def remove_row(self, row: int) -> None:
        if self.has[row]:
            self.has[row] = False
            if self._added.pop(row, None) is None:  # else it never heard of it
                self._removed.append(row)

    def update(self) -> None:
        told = BatchUpdate(self._removed, list(self._added.values())) if self._removed or self._added else None
        self._removed, self._added = [], {}
        self.processor.update_state(told)


class Processors(RowExtra[Tensor]):
    """See the module docstring. Their rows are sampled by torch."""

    def __init__(
        self, kinds: Sequence[type[LogitsProcessor]], config: MeshConfig, device: torch.device, max_rows: int
    ) -> None:
        self._used = [_Used(kind(config, device, max_rows), max_rows) for kind in kinds]
        self._device = device

    def has_row(self, new: NewRow) -> bool:
        return any(used.processor.wants(new.sampling) for used in self._used)

    def columns_of(self, new: NewRow) -> dict[str, int]:
        return {"by_torch_until": ALWAYS}

    def add_row(self, new: NewRow) -> None:
        ids = np.frombuffer(new.token_ids, np.int32)
        prompt, output = ids[: new.num_prompt_tokens], ids[new.num_prompt_tokens :]
        added = AddedRequest(int(new.row), new.sampling, prompt, output)
        for used in self._used:
            used.add_row(added)

    def remove_row(self, row: int) -> None:
        for used in self._used:
            used.remove_row(row)

    def apply(
        self,
        logits: Tensor,
        rows: NDArray[np.int32],
        lens: NDArray[np.int64],
        prompt_lens: NDArray[np.int64],
        tokens: Tensor,
        *,
        argmax_invariant: bool,
    ) -> None:
        """Changes the lines of logits [l, vocab] whose rows are processed. `tokens` int32 [max_rows, len]: all tokens by row."""
        for used in self._used:
            places = np.flatnonzero(used.has[rows])
            if used.is_invariant is not argmax_invariant or not len(places):
                continue
            used.update()
            batch = _batch(rows[places], lens[places], prompt_lens[places], tokens, self._device)
            index = torch.from_numpy(places).to(self._device, non_blocking=True)
            part = logits[index]
            found = used.processor.apply(part, batch)
            if found.shape != part.shape:
                name = type(used.processor).__name__
                raise ValueError(f"logits processor {name}: made {tuple(found.shape)} of {tuple(part.shape)}")
            logits[index] = found.to(logits.dtype)


def processors_of(config: MeshConfig, device: torch.device, max_rows: int) -> Processors | None:
    """Those of --logits-processors and of installed packages, and those that the model itself needs; None: there are none.
    ProcessorError."""
    assert config.resolved is not None
    kinds = logits_processors.loaded(config.resolved.logits_processors)
    if config.resolved.speech is not None:
        kinds.append(TimestampRules)
    return Processors(kinds, config, device, max_rows) if kinds else None


def _batch(
    rows: NDArray[np.int32],
    lens: NDArray[np.int64],
    prompt_lens: NDArray[np.int64],
    tokens: Tensor,
    device: torch.device,
) -> LogitsBatch:
    def token_ids() -> Tensor:
        index = torch.from_numpy(rows.astype(np.int64)).to(device, non_blocking=True)
        return tokens[index, : int(lens.max())].clamp(min=0)  # the place of a vector has no id

    return LogitsBatch(rows, lens, prompt_lens, token_ids)
