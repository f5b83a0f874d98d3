"""From hidden states to tokens by Triton kernels: logits, penalties, truncation, sampling, log-probabilities. Nothing waits.

Logits of a batch are made in chunks of LINES through one buffer, inside CUDA graphs and outside. What the kernels cannot do (allowed
ids, many biased ones) is done again for those requests alone, by the general sampler. Owned by the engine; used by the stepper thread.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.kernels.llama_samplers.kernel import llama_samplers
from meshlm.kernels.penalties import kernel as penalties
from meshlm.kernels.sample import kernel as sampling
from meshlm.kernels.token_mask.kernel import token_mask, workspace
from meshlm.kernels.top_k_top_p import kernel as truncation
from meshlm.workers.batch import StepInputs
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.output import logprobs
from meshlm.workers.output.grammars import TokenMask
from meshlm.workers.output.logprobs import Details, Part
from meshlm.workers.output.sampler import SampleRows, apply_mask, process, sample, sample_rows
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.columns import RowColumns
from meshlm.workers.rows.device_rows import DeviceRows, breakers_buffer, put
from meshlm.workers.rows.step_columns import StepColumns

DEPTH = 2  # a step's masks are made when the step before has read its own


class MaskStaging:
    """`lines` [rows] says which of `words` [rows, vocab / 32] is a line's mask, -1 for none (kernels/token_mask)."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.lines, self.words = workspace(rows, vocab, device)
        self._device, self._slot = device, 0
        self._pinned: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._events: list[Any] = []
        self._cuda_stream: Any = None

    def take(self, count: int) -> I32:
        """Where the next masks are written, of so many lines."""
        if not self._pinned:
            self._allocate()
        self._slot = (self._slot + 1) % DEPTH
        if self._events:
            self._events[self._slot].synchronize()  # long past
        found: I32 = self._pinned[self._slot][1][:count].numpy()
        return found

    def send(self, mask: TokenMask) -> None:
        """Launches from now on find these masks, which are written where `take` said. Steps before must have read theirs."""
        lines, words = self._pinned[self._slot]
        slot, count = self._slot, len(mask.lines)
        which = lines.numpy()
        which.fill(-1)
        which[mask.lines] = np.arange(count)
        if self._device.type != "cuda":
            self.lines.copy_(lines)
            self.words[:count].copy_(words[:count])
            return
        with torch.cuda.stream(self._cuda_stream):
            self.lines.copy_(lines, non_blocking=True)
            self.words[:count].copy_(words[:count], non_blocking=True)
            self._events[slot].record()
        torch.cuda.current_stream().wait_event(self._events[slot])

    def _allocate(self) -> None:
        """With the first masks: most servers see none."""
        cuda = self._device.type == "cuda"
        for _ in range(DEPTH):
            like = (self.lines, self.words)
            lines, words = (torch.empty(each.shape, dtype=each.dtype, pin_memory=cuda) for each in like)
            self._pinned.append((lines, words))
            if cuda:
                make: Any = torch.cuda.Event  # typed in some versions of torch only
                self._events.append(make())
        if cuda:
            make = torch.cuda.Stream
            self._cuda_stream = make()


LINES = 288  # of logits at a time: 256 streams and the prompts beside them (graphs.MIXED_REQUESTS); more are not faster
LINES_BY_TORCH = 32  # a sort of one line takes several times its memory


class LogitsSampler:
    """See `TorchHead`. `hidden` and `sampled` hold the states and tokens of the last step, in the order of its
    sampling requests."""

    def __init__(
        self, model: Decoder, rows: DeviceRows, dtype: torch.dtype, device: torch.device, lines: int = LINES
    ) -> None:
        """lines: 0 where it chooses nothing (a stage of a pipeline that is not the last)."""
        self._model, self._rows, self._device = model, rows, device
        count, vocab = rows.max_lines, model.spec.vocab_size
        lines = self._lines = min(count, lines)
        self.alone = False  # log-probabilities and the general sampler take line by line, as if each were the only one
        self.logits = torch.empty(lines, vocab, dtype=dtype, device=device)
        self.hidden = torch.empty(count, model.spec.hidden_size, dtype=dtype, device=device)
        self.sampled = torch.zeros(count, dtype=torch.int32, device=device)
        self._drawn, self.vocab_size = torch.zeros_like(self.sampled), vocab
        self._order = torch.arange(count, dtype=torch.int32, device=device)
        self._counts = penalties.workspace(lines, vocab, device)
        self._top_k_top_p_workspace = truncation.workspace(lines, vocab, dtype, device)
        self._workspace = sampling.workspace(lines, vocab, device)
        of = rows.columns
        self._sampling = sampling.Rows(of["temperature"], of["seed"], of["num_prompt_tokens"], rows.tokens)
        self._limits = truncation.Limits(of["temperature"], of["min_p"], of["top_k"], of["top_p"])
        self._penalties = penalties.Penalties(of["repetition_penalty"], of["presence_penalty"], of["frequency_penalty"])
        self._breakers = rows.table.columns.breakers = breakers_buffer(rows.table.num_rows, vocab, device)
        self._mask: TokenMask | None = None
        self._last_mask: TokenMask | None = None  # of the step whose log-probabilities are next
        self._masks = MaskStaging(count if lines else 0, vocab, device)
        self._edits = penalties.Edits(of["num_edits"], of["edit_ids"], of["edit_adds"], of["edit_untils"])

    def sample(self, hidden: Tensor, batch: StepInputs, step: StepColumns) -> None:
        self.choose(hidden, batch, masked=self._mask is not None)

    def take_mask(self, count: int) -> I32:
        return self._masks.take(count)

    def mask(self, mask: TokenMask) -> None:
        self._mask = mask
        self._masks.send(mask)

    def choose(self, hidden: Tensor, batch: StepInputs, *, masked: bool = False) -> None:
        """A token for each of hidden [l, hidden], as kernels can: bias, min_tokens, penalties, temperature, top-k, top-p, min-p.

        Line i belongs to the request places[i] of the batch's columns, or i without places."""
        assert batch.columns is not None
        self.keep(hidden)
        columns = (batch.columns.rows, batch.columns.starts, batch.columns.ends)
        self._choose(hidden, columns, batch.places, masked=masked)

    def keep(self, hidden: Tensor) -> None:
        """For `choose_kept`, by_torch and log-probabilities: penalties and truncation spoil the logits."""
        self.hidden[: len(hidden)].copy_(hidden)

    def choose_kept(self, count: int, columns: tuple[Tensor, Tensor, Tensor], places: Tensor | None) -> None:
        """As `choose`, for so many hidden states that were kept, with masks."""
        self._choose(self.hidden[:count], columns, places, masked=True)

    def draw(
        self, hidden: Tensor, columns: tuple[Tensor, Tensor, Tensor], logits_of: Callable[[Tensor, Tensor], None]
    ) -> None:
        """A token for each of the requests, written behind its row, of logits that another model makes, [l, vocab] into the second
        tensor, by the rows' own parameters and draws."""
        for begin in range(0, len(hidden), self._lines):
            end = min(begin + self._lines, len(hidden))
            logits, named = self.logits[: end - begin], self._order[begin:end]
            logits_of(hidden[begin:end], logits)
            self._choose_of(logits, columns, named, not begin, self._drawn[begin:])

    def _choose(
        self, hidden: Tensor, columns: tuple[Tensor, Tensor, Tensor], places: Tensor | None, *, masked: bool
    ) -> None:
        for begin in range(0, len(hidden), self._lines):
            end = min(begin + self._lines, len(hidden))
            named = self._order[begin:end] if places is None else places[begin:end]
            in_order = places is None and not begin
            masks = self._masks.lines[begin:end] if masked else None
            self._choose_chunk(hidden[begin:end], columns, named, in_order, masks, self.sampled[begin:])

    def _choose_chunk(
        self,
        hidden: Tensor,
        columns: tuple[Tensor, Tensor, Tensor],
        places: Tensor,
        in_order: bool,
        masks: Tensor | None,
        out: Tensor,
    ) -> None:
        """in_order: line i is request i, which the kernels but the first have a variant for. masks: which mask is a line's."""
        logits = self.logits[: len(hidden)]
        self._model.logits(hidden, out=logits)
        if masks is not None:
            token_mask(logits, masks, self._masks.words)
        self._choose_of(logits, columns, places, in_order, out)

    def _choose_of(
        self, logits: Tensor, columns: tuple[Tensor, Tensor, Tensor], places: Tensor, in_order: bool, out: Tensor
    ) -> None:
        """See `_choose_chunk`; changes the logits."""
        some = None if in_order else places
        lens, tokens = self._sampling.prompt_lens, self._sampling.tokens
        penalties.penalise(logits, columns, places, self._penalties, self._edits, lens, tokens, self._counts)
        llama_samplers(logits, columns, some, self._rows.columns, self._breakers, tokens, self._counts)
        truncation.top_k_top_p(logits, columns[0], some, self._limits, self._top_k_top_p_workspace)
        sampling.sample(logits, columns, some, self._sampling, self._workspace, out)

    def sample_rest(self, step: StepColumns) -> None:
        columns = self._rows.table.columns
        self.by_torch(sample_rows(step, columns), columns)

    def logprobs(self, step: StepColumns, counts: I32 | None) -> list[Details]:
        places = step.places if step.verified is None else step.verified.origins[step.places]
        columns = self._rows.table.columns
        at = None if columns.logprobs_mode.startswith("raw") else sample_rows(step, columns)
        return self.details(step.rows[step.places], places, columns, at)

    def by_torch(self, at: SampleRows, columns: RowColumns) -> None:
        """Sample again where the kernels could not do all that a request asks for. `at`: of all lines of the step."""
        needy, mask = columns.need_torch(at.rows, at.output_index), self._mask
        self._mask, self._last_mask, at_once = None, mask, 1 if self.alone else LINES_BY_TORCH
        for begin in range(0, len(needy), at_once):
            lines = needy[begin : begin + at_once]
            some, index = at.some(lines), put(lines, self._device)
            logits = self._model.logits(self.hidden[index])
            if mask is not None:
                apply_mask(logits, mask.of(lines))
            token_ids = sample(logits, some, columns, self._rows.tokens).int()
            where = put(np.stack((some.rows.astype(np.int64), some.lens)), self._device)
            self._rows.tokens[where[0], where[1]] = token_ids.clamp(min=0)
            self.sampled[index] = token_ids

    def details(
        self, rows: NDArray[np.int32], places: NDArray[np.int64], columns: RowColumns, at: SampleRows | None = None
    ) -> list[Details]:
        """The log-probabilities of the sampled tokens whose request wants them. rows and places are those of all lines of the step, and
        so is `at`, where those of processed logits are wanted."""
        wanted = np.flatnonzero(columns["logprobs"][rows] >= 0)
        if not len(wanted):
            return []
        ids = [columns.params[row].logprob_token_ids for row in rows[wanted].tolist()]
        certain = np.array([bool(one) for one in ids])
        found = self._logprobs(wanted[~certain], rows, places, columns, at)
        return found + self._logprobs(wanted[certain], rows, places, columns, at, [one for one in ids if one])

    def _processed(self, lines: NDArray[np.intp], at: SampleRows, columns: RowColumns) -> Callable[[Tensor], Tensor]:
        """Makes the logits of these lines by which their tokens were chosen, some at a time, in order."""
        left = lines

        def logits_of(hidden: Tensor) -> Tensor:
            nonlocal left
            some, left = left[: len(hidden)], left[len(hidden) :]
            logits = self._model.logits(hidden)
            if self._last_mask is not None:
                apply_mask(logits, self._last_mask.of(some))
            return process(logits, at.some(some), columns, self._rows.tokens).final()

        return logits_of

    def _logprobs(
        self,
        lines: NDArray[np.intp],
        rows: NDArray[np.int32],
        places: NDArray[np.int64],
        columns: RowColumns,
        at: SampleRows | None,
        ids: list[tuple[int, ...]] | None = None,
    ) -> list[Details]:
        """Gives the log-probabilities of some lines: of the likeliest tokens, or of those that `ids` has for each line."""
        if not len(lines):
            return []
        widths = columns["logprobs"][rows[lines]].tolist()
        chosen: Tensor | None = None
        if ids is not None:
            padded = np.zeros((len(lines), max(widths)), np.int64)
            for nth, one in enumerate(ids):
                padded[nth, : len(one)] = one
            chosen = put(padded, self._device)
        index = put(lines, self._device)
        hidden, token_ids = self.hidden[index], self.sampled[index].long().clamp_(min=0)
        each = widths if self.alone else []
        logits_of = self._model.logits if at is None else self._processed(lines, at, columns)
        normal = columns.logprobs_mode.endswith("logprobs")
        packed = logprobs.in_chunks(hidden, token_ids, max(widths), logits_of, chosen, alone=each, normal=normal)
        # The lines of a request stand together.
        named, begins, counts = np.unique(places[lines], return_index=True, return_counts=True)
        spans = zip(named.tolist(), begins.tolist(), counts.tolist(), strict=True)
        return [Details(packed, [Part(place, begin, begin + count, widths[begin]) for place, begin, count in spans])]

    def warm_up_masks(self) -> None:
        """Compiles what steps with masks need beside others."""
        token_mask(self.logits[:1], self._masks.lines[:1], self._masks.words)

    def one_line(self) -> None:
        """The logits of one line as `by_torch` and log-probabilities make them, by another kernel than `choose`: compiled here."""
        self._model.logits(self.hidden[:1])

    def warm_up(self) -> None:
        """The largest log-probability chunk that a step may need beside its own, so that memory is profiled with it."""
        lines = min(len(self.hidden), logprobs.LINES)
        logprobs.packed(self._model.logits(self.hidden[:lines]), self.sampled[:lines].long().clamp_(min=0), 1)
