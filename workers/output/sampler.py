"""Logits to tokens, for the whole batch at once. Any device.

Order of operations as in vLLM: allowed ids and min_tokens, logit bias, logits processors, penalties, llama.cpp's samplers, temperature,
processors that keep the likeliest token, min-p, top-k, top-p, draw.
The draw inverts the cumulative distribution over token ids at one uniform number (sampler.py).
"""

from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from meshlm.kernels.llama_samplers.reference import XTC_SALT, Chain, repeat_less, truncate
from meshlm.kernels.sample.outcomes import NONE_LEFT, NOT_NUMBERS
from meshlm.workers.batch import StepInputs
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.output import logprobs
from meshlm.workers.output.grammars import TokenMask
from meshlm.workers.output.logprobs import Details, Part
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.columns import RowColumns
from meshlm.workers.rows.device_rows import DeviceRows, breakers_buffer, put
from meshlm.workers.rows.step_columns import StepColumns

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 [n] in [0, 1), one for each (seed, output index)."""
    z = seeds + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _A
    z = (z ^ (z >> np.uint64(27))) * _B
    z ^= z >> np.uint64(31)
    found: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


ANY_TOKEN, NO_TOKEN = -1, -2


class BannedWords:
    """The last token of a sequence may not come where the rest of it stands at the end of the output."""

    def __init__(self, words: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self._longest = max(map(len, words)) - 1
        begins = np.full((len(words), self._longest), ANY_TOKEN, np.int32)
        for nth, word in enumerate(words):
            begins[nth, self._longest + 1 - len(word) :] = word[:-1]
        self._begins = torch.from_numpy(begins).to(device, non_blocking=True)
        self._last = torch.tensor([word[-1] for word in words], dtype=torch.int64).to(device, non_blocking=True)

    def ban(self, line: Tensor, output: Tensor) -> None:
        """Changes the logits line [vocab] that follow the row's output, int32 [n]."""
        end = output[max(0, len(output) - self._longest) :]
        end = F.pad(end, (self._longest - len(end), 0), value=NO_TOKEN)
        stands = ((self._begins == end) | (self._begins == ANY_TOKEN)).all(dim=1)
        line.index_add_(0, self._last, torch.where(stands, -torch.inf, 0.0).to(line.dtype))


@lru_cache(maxsize=1024)
def banned_words(words: tuple[tuple[int, ...], ...], device: torch.device) -> BannedWords:
    """Made once for the rows that have them."""
    return BannedWords(words, device)


MIN_TEMPERATURE = 1e-5  # below: greedy


class SampleRows(NamedTuple):
    """The rows that a sample is for; all columns have length l and stand on the host."""

    rows: NDArray[np.int32]
    output_index: NDArray[np.int64]  # of the token that is drawn
    lens: NDArray[np.int64]  # tokens before it, prompt included
    prompt_lens: NDArray[np.int64]

    def some(self, places: NDArray[np.intp]) -> "SampleRows":
        return SampleRows(self.rows[places], self.output_index[places], self.lens[places], self.prompt_lens[places])


def sample_rows(step: StepColumns, columns: RowColumns) -> SampleRows:
    """The lines of a step: the last token of each request that samples, and before it those that drafts follow."""
    lines = step.lines()
    rows, lens = step.rows[lines.places], lines.lens
    prompt_lens = columns["num_prompt_tokens"][rows].astype(np.int64)
    return SampleRows(rows, lens - prompt_lens, lens, prompt_lens)


class Processed(NamedTuple):
    """Logits [l, vocab] as the parameters of their rows have left them."""

    logits: Tensor  # without temperature and truncation: greedy rows choose by these
    scaled: Tensor | None  # with both, float32; None: all rows are greedy
    greedy: NDArray[np.bool_]  # [l]

    def final(self) -> Tensor:
        """[l, vocab] float32: what each row's token is chosen by."""
        if self.scaled is None:
            return self.logits.float()
        return torch.where(put(self.greedy, self.logits.device)[:, None], self.logits.float(), self.scaled)


def sample(logits: Tensor, at: SampleRows, columns: RowColumns, tokens: Tensor) -> Tensor:
    """Token ids int64 [l] for logits [l, vocab] (changed in place); an outcome (kernels/sample/outcomes.py) where none can be chosen.

    `tokens` int32 [max_rows, len]: all tokens by row."""
    return chosen(process(logits, at, columns, tokens), at, columns)


def chosen(processed: Processed, at: SampleRows, columns: RowColumns) -> Tensor:
    """Token ids int64 [l], as of `sample`."""
    logits, scaled, greedy = processed
    if scaled is None:
        return _likeliest(logits)
    device = logits.device
    drawn = _draw(scaled, put(uniforms(columns["seed"][at.rows], at.output_index), device))
    if not greedy.any():
        return drawn
    return torch.where(put(greedy, device), _likeliest(logits), drawn)


def process(logits: Tensor, at: SampleRows, columns: RowColumns, tokens: Tensor) -> Processed:
    """All but the draw of `sample`. Changes the logits."""
    rows = at.rows
    listed = np.flatnonzero(columns["has_lists"][rows])
    if len(listed):
        _apply_lists(logits, listed, at, columns, tokens)
    if columns.processors is not None:
        columns.processors(logits, rows, at.lens, at.prompt_lens, tokens, False)
    penalised = np.flatnonzero(columns["penalised"][rows])
    if len(penalised):
        _penalise(logits, penalised, at, columns, tokens)
    as_llama = np.flatnonzero(columns["as_llama"][rows])
    if len(as_llama):
        _sample_as_llama(logits, as_llama, at, columns, tokens)
    temperature = columns["temperature"][rows]
    greedy = temperature < MIN_TEMPERATURE
    if greedy.all():
        return Processed(logits, None, greedy)
    scale = put(np.where(greedy, 1.0, temperature), logits.device)
    scaled = logits.float() / scale[:, None]
    if columns.processors is not None:
        columns.processors(scaled, rows, at.lens, at.prompt_lens, tokens, True)
    _top_k_top_p(scaled, rows, columns)
    return Processed(logits, scaled, greedy)


def _likeliest(logits: Tensor) -> Tensor:
    """The first of the largest logits; what is not a number is larger than all, so the chosen logit tells of it."""
    token = logits.argmax(dim=-1)
    logit = logits.gather(1, token[:, None]).squeeze(1)
    return token.masked_fill_(logit == -torch.inf, NONE_LEFT).masked_fill_(logit.isnan(), NOT_NUMBERS)


def _draw(scaled: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds uniform * total. float64 sums: 128k terms add up exactly enough."""
    cumulative = torch.softmax(scaled, dim=-1).double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    token = torch.searchsorted(cumulative, uniform[:, None] * total, right=True).squeeze(1)
    token.clamp_(max=scaled.shape[1] - 1)
    if scaled.device.type == "cpu" and bool(total.isfinite().all()):
        return token
    top = scaled.amax(dim=-1)
    no_number = top.isnan() | (top == torch.inf)  # its softmax is not a number
    return token.masked_fill_(top == -torch.inf, NONE_LEFT).masked_fill_(no_number, NOT_NUMBERS)


def _top_k_top_p(scaled: Tensor, rows: NDArray[np.int32], columns: RowColumns) -> None:
    """min-p, top-k and top-p, each only where a row of the batch asks for it. Tokens outside become -inf."""
    vocab = scaled.shape[1]
    min_p, top_k, top_p = columns["min_p"][rows], columns["top_k"][rows].astype(np.int64), columns["top_p"][rows]
    device = scaled.device
    if (min_p > 0).any():
        floor = scaled.amax(dim=-1, keepdim=True) + put(np.log(np.maximum(min_p, 1e-30)), device)[:, None]
        off = put(min_p <= 0, device)[:, None]
        scaled.masked_fill_((scaled < floor) & ~off, -torch.inf)
    limited = (top_k > 0) & (top_k < vocab)
    if not limited.any() and not (top_p < 1).any():
        return
    ordered, order = scaled.sort(dim=-1, descending=True)
    if limited.any():
        k = put(np.where(limited, top_k, vocab), device)
        kth = ordered.gather(1, (k - 1)[:, None])
        ordered.masked_fill_(ordered < kth, -torch.inf)  # ties with the k-th stay, as vLLM keeps them
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    share = put(np.where(top_p < 1, top_p, 2.0).astype(np.float32), device)[:, None]
    ordered.masked_fill_(before >= share, -torch.inf)
    scaled.scatter_(1, order, ordered)


def _penalise(logits: Tensor, places: NDArray[np.intp], at: SampleRows, columns: RowColumns, tokens: Tensor) -> None:
    """Repetition over prompt and output, presence and frequency over output (Keskar et al. 2019; OpenAI's API)."""
    device, vocab = logits.device, logits.shape[1]
    rows = at.rows[places]
    longest = int(at.lens[places].max())
    ids = tokens[put(rows.astype(np.int64), device), :longest].long()
    position = torch.arange(longest, device=device)
    valid = position < put(at.lens[places], device)[:, None]
    is_output = valid & (position >= put(at.prompt_lens[places], device)[:, None])
    valid &= ids >= 0  # the place of a vector has no id
    ids = torch.where(valid, ids, 0)
    shape = (len(places), vocab)
    counts = torch.zeros(shape, device=device).scatter_add_(1, ids, is_output.float())
    seen = torch.zeros(shape, device=device).scatter_add_(1, ids, valid.float()) > 0

    def column(name: str) -> Tensor:
        return put(columns[name][rows], device)[:, None]

    index = put(places, device)
    part = logits[index].float()
    factor = torch.where(seen, column("repetition_penalty"), 1.0)
    part = torch.where(part > 0, part / factor, part * factor)
    part -= column("frequency_penalty") * counts + column("presence_penalty") * (counts > 0)
    logits[index] = part.to(logits.dtype)


def _sample_as_llama(
    logits: Tensor, places: NDArray[np.intp], at: SampleRows, columns: RowColumns, tokens: Tensor
) -> None:
    draws = uniforms(columns["seed"][at.rows] ^ np.uint64(XTC_SALT), at.output_index).astype(np.float32)
    for place in places.tolist():
        row, line = int(at.rows[place]), logits[place]
        params = columns.params[row]
        if params.repeats_less:
            end, last_n = int(at.lens[place]), int(columns["dry_last_n"][row])
            text = tokens[row, max(0, end - last_n) : end]
            breaks = torch.zeros_like(text, dtype=torch.bool)
            if columns.breakers is not None:
                known = text.clamp(min=0)
                breaks = (columns.breakers[row, known // 32] >> (known % 32)) & 1 == 1
            longest = int(columns["dry_longest"][row])
            repeat_less(
                line, text, breaks, (params.dry_multiplier, params.dry_base, params.dry_allowed_length, longest)
            )
        if params.truncates_as_llama:
            chain = Chain._make(attrgetter(*Chain._fields)(params))
            truncate(line, chain, float(draws[place]))


def _apply_lists(logits: Tensor, places: NDArray[np.intp], at: SampleRows, columns: RowColumns, tokens: Tensor) -> None:
    """Rows with allowed ids, a bias, bad words, or tokens that may not come yet."""
    for place in places.tolist():
        row, line = int(at.rows[place]), logits[place]
        params = columns.params[row]

        def ban(ids: tuple[int, ...], line: Tensor = line) -> None:
            line.index_fill_(0, put(np.array(ids, np.int64), line.device), -torch.inf)

        if params.allowed_token_ids:
            allowed = put(np.array(params.allowed_token_ids, np.int64), line.device)
            kept = line[allowed].clone()
            line.fill_(-torch.inf)
            line[allowed] = kept
        if int(at.output_index[place]) < params.min_tokens:
            ban(params.stop_token_ids + params.eos_token_ids)
        if not at.output_index[place]:
            ban(params.begin_suppress_token_ids)
        if params.logit_bias:
            ids = put(np.array(list(params.logit_bias), np.int64), line.device)
            line[ids] += put(np.array(list(params.logit_bias.values()), np.float32), line.device).to(line.dtype)
        if params.bad_words_token_ids:
            output = tokens[row, int(at.prompt_lens[place]) : int(at.lens[place])]
            banned_words(params.bad_words_token_ids, line.device).ban(line, output)


def apply_mask(logits: Tensor, mask: TokenMask) -> None:
    """Tokens that may not come get -inf. logits [l, vocab] are changed in place."""
    lines, banned = put(mask.lines, logits.device), put(~mask.allowed(logits.shape[1]), logits.device)
    logits[lines] = logits[lines].masked_fill_(banned, -torch.inf)


class TorchHead:
    """A device's way to choose tokens; nothing in it waits for the device. All rows at once, by the general sampler.

    sampled: int32 [l] or longer, the tokens (or outcomes: kernels/sample/outcomes.py) of the last step's sampling requests, in order.
    """

    def __init__(self, model: Decoder, rows: DeviceRows, dtype: torch.dtype) -> None:
        self._model, self._rows, self._dtype, self._device = model, rows, dtype, rows.state.device
        self.sampled = torch.empty(0, dtype=torch.int32, device=self._device)
        columns, vocab = rows.table.columns, model.spec.vocab_size
        columns.breakers = breakers_buffer(rows.table.num_rows, vocab, self._device)
        self._mask: TokenMask | None = None
        self._raw: Tensor | None = (
            None  # logits of the rows that want log-probabilities, before or after sampling changed them
        )

    def take_mask(self, count: int) -> I32:
        """Where the masks of so many lines are written, int32 [count, vocab / 32]."""
        return np.empty((count, -(-self._model.spec.vocab_size // 32)), np.int32)

    def mask(self, mask: TokenMask) -> None:
        """The next tokens are chosen among those that this allows, in the lines that have a grammar."""
        self._mask = mask

    def sample(self, hidden: Tensor, batch: StepInputs, step: StepColumns) -> None:
        """A token for each of hidden [l, hidden]; it is written behind its row, too."""
        columns = self._rows.table.columns
        at = sample_rows(step, columns)
        adapters = None
        if batch.adapters is not None and batch.logits_indices is not None:
            adapters = batch.adapters.of_lines(batch.logits_indices)
        logits = self._model.logits(hidden) if adapters is None else adapters.logits(self._model, hidden)
        wanted = np.flatnonzero(columns["logprobs"][at.rows] >= 0)
        is_raw = columns.logprobs_mode.startswith("raw")
        self._raw = logits[put(wanted, self._device)].clone() if len(wanted) and is_raw else None
        if self._mask is not None:
            apply_mask(logits, self._mask)
            self._mask = None
        processed = process(logits, at, columns, self._rows.tokens)
        if len(wanted) and not is_raw:
            self._raw = processed.final()[put(wanted, self._device)]
        greedy = processed.scaled is None
        self.sampled = (_likeliest(logits) if greedy else chosen(processed, at, columns)).int()
        where = put(np.stack((at.rows.astype(np.int64), at.lens)), self._device)
        self._rows.tokens[where[0], where[1]] = self.sampled.clamp(min=0)

    def sample_rest(self, step: StepColumns) -> None:
        """After the step, or its graph: what could not be sampled in it. Here all is."""

    def logprobs(self, step: StepColumns, counts: I32 | None) -> list[Details]:
        """The log-probabilities that are asked for, of the tokens that rows get: `counts` of each request that samples, or one each.

        Token by token, as if each were alone: equal logits are then in the same order whatever others ask for."""
        if self._raw is None:
            return []
        raw, self._raw = self._raw, None
        rows, ids = step.rows[step.places], self.sampled.long().clamp_(min=0)
        columns = self._rows.table.columns
        widths, normal = columns["logprobs"][rows], columns.logprobs_mode.endswith("logprobs")
        counts = np.ones(len(rows), np.int32) if counts is None else counts
        lines = np.ones(len(rows), np.int32) if step.drafts is None else 1 + step.drafts.counts
        begins, found, at = np.cumsum(lines) - lines, [], 0  # at: the next line of raw
        for nth in np.flatnonzero(widths >= 0).tolist():
            line, count, width, named = (
                int(begins[nth]),
                int(counts[nth]),
                int(widths[nth]),
                self._chosen(int(rows[nth])),
            )
            packed = [
                logprobs.packed(
                    raw[at + one : at + one + 1], ids[line + one : line + one + 1], width, named, normal=normal
                )
                for one in range(count)
            ]
            found.append(Details(torch.cat(packed), [Part(int(step.places[nth]), 0, count, width)]))
            at += int(lines[nth])
        return found

    def _chosen(self, row: int) -> Tensor | None:
        """The tokens whose log-probabilities a row wants, int64 [1, width]; None: the likeliest."""
        ids = self._rows.table.columns.params[row].logprob_token_ids
        return put(np.array([ids], np.int64), self._device) if ids else None

    def warm_up(self) -> None:
        """Allocate what a step may need at most beside its own, so that memory is profiled with it."""
        hidden = torch.zeros(self._rows.max_rows, self._model.spec.hidden_size, dtype=self._dtype, device=self._device)
        self._model.logits(hidden).float().softmax(dim=-1).double().cumsum(dim=-1)
