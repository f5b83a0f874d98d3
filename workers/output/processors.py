"""The logits processors of one worker, and which rows they process. Owned by the engine's rows, used by the sampler."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.protocol.audio import WHISPER_TIMESTAMPS
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.step import NewRow
from meshlm.protocol.sampling import SamplingParams
from meshlm.runtime import logits_processors
from meshlm.workers.output.logits_processor import AddedRequest, BatchUpdate, LogitsBatch, LogitsProcessor
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
        argmax_invariant: bool,
    ) -> None:
        """Changes the lines of logits [l, vocab] whose rows are processed. `tokens` int32 [max_rows, len]: all tokens by row."""
        for used in self._used:
            places = np.flatnonzero(used.has[rows])
            if used.is_invariant is not argmax_invariant or not len(places):
                continue
            used.update()
            some, ends = rows[places], lens[places]
            token_ids = partial(_token_ids, some, ends, tokens, self._device)
            batch = LogitsBatch(some, ends, prompt_lens[places], token_ids)
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
    kinds = logits_processors.loaded(config.require_resolved().logits_processors)
    if config.require_resolved().speech is not None:
        kinds.append(TimestampRules)
    return Processors(kinds, config, device, max_rows) if kinds else None


def _token_ids(rows: NDArray[np.int32], lens: NDArray[np.int64], tokens: Tensor, device: torch.device) -> Tensor:
    index = torch.from_numpy(rows.astype(np.int64)).to(device, non_blocking=True)
    return tokens[index, : int(lens.max())].clamp(min=0)  # the place of a vector has no id


class TimestampRules(LogitsProcessor):
    """See `LogitsProcessor`. It has no state: what may follow is a function of the tokens."""

    def __init__(self, config: MeshConfig, device: torch.device, max_rows: int) -> None:
        super().__init__(config, device, max_rows)
        speech = config.require_resolved().speech
        assert speech is not None
        self._zero, self._max_initial_timestamp_index = speech.no_timestamps + 1, speech.max_initial_timestamp_index
        ends = (*config.require_resolved().eos_token_ids, speech.no_timestamps)
        self._text_end = min(ends)  # tokens of words are before it

    @classmethod
    def wants(cls, params: SamplingParams) -> bool:
        return params.extra_args.get(WHISPER_TIMESTAMPS) is True

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Nothing is kept."""

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        """Logits [l, vocab] -> the same, where tokens that may not follow have no chance."""
        device, tokens = logits.device, batch.token_ids()
        columns = torch.stack((torch.from_numpy(batch.num_tokens), torch.from_numpy(batch.num_prompt_tokens)))
        ends, begins = columns.to(device, non_blocking=True)[:, :, None]  # each [l, 1]
        at = torch.arange(tokens.shape[1], device=device)
        written = (at >= begins) & (at < ends)
        is_time = (tokens >= self._zero) & written
        where = torch.where(is_time, at, -1).amax(1, keepdim=True)  # of the last time
        latest = torch.where(where < 0, self._zero - 1, tokens.gather(1, where.clamp(min=0)))

        def is_time_at(back: int) -> Tensor:
            """Whether the token so many places before the next one is a time; [l, 1]."""
            found: Tensor = is_time.gather(1, (ends - back).clamp(min=0)) & (ends - back >= begins)
            return found

        first, last = ends == begins, is_time_at(1)
        paired = is_time_at(2) | (ends - begins < 2)
        ids = torch.arange(logits.shape[1], device=device)
        times = ids >= self._zero
        earliest = torch.where(last & ~paired, latest, latest + 1)
        banned = ids == self._zero - 1
        banned = banned | (times & (last & paired)) | ((ids < self._text_end) & (last & ~paired))
        banned = banned | (times & (ids < earliest)) | (~times & first)
        if self._max_initial_timestamp_index >= 0:
            banned = banned | ((ids > self._zero + self._max_initial_timestamp_index) & first)
        logits = logits.masked_fill(banned, -torch.inf)
        likely = logits.float()
        of_times = likely[:, self._zero :].logsumexp(1, keepdim=True)
        others = likely[:, : self._zero].amax(1, keepdim=True)
        return logits.masked_fill(~times & (of_times > others), -torch.inf)
