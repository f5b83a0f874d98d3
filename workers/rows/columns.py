"""The numbers that each row has, declared once: the host's table, the device's regions (table.py), its views of them
(rows/device_rows.py) and what an empty row has all follow from `COLUMNS`. No torch: the fake worker has the same columns.

A new sampling parameter is a field of `SamplingParams`, a `Column` here, and the mathematics that reads it.
"""

import math
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshlm.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

ProcessLogits = Callable[["Tensor", NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], "Tensor", bool], None]
"""Changes the lines of logits whose rows a logits processor wants (output/processors.py: `Processors.apply`)."""
ALWAYS: Final = np.iinfo(np.int32).max
MAX_LOG = 88.7228391  # of the largest float32
EDITS = 16  # ids of a request whose logits kernels/penalties edits
EMPTY = SamplingParams(temperature=0.0)  # of a row that nobody has, and of padding: it draws nothing


class Column(NamedTuple):
    """A number of each row, or `width` of them. The kernels see a number of 64 bits as two halves, the low one first."""

    name: str
    dtype: type[np.generic]  # of 32 or 64 bits
    of_params: Callable[[SamplingParams], Any] | None  # None: the plan says it (`RowColumns.set`)
    width: int = 1
    on_device: bool = True


def _field(name: str, dtype: type[np.generic], *, on_device: bool = True) -> Column:
    """A column that is a field of SamplingParams."""
    return Column(name, dtype, attrgetter(name), on_device=on_device)


def edits(params: SamplingParams) -> list[tuple[int, float, int]] | None:
    """Bias, bad words of one token, min_tokens and tokens that come not first as (id, what is added, before which output index), each
    id once; None where that is not enough."""
    if not _has_lists(params):
        return []
    stops = dict.fromkeys(params.stop_token_ids + params.eos_token_ids) if params.min_tokens else {}
    found = [(token, -np.inf, params.min_tokens) for token in stops]
    found += [(token, -np.inf, 1) for token in params.begin_suppress_token_ids if token not in stops]
    found += [(token, bias, ALWAYS) for token, bias in params.logit_bias.items()]
    found += [(word[0], -np.inf, ALWAYS) for word in params.bad_words_token_ids]
    longer = any(len(word) > 1 for word in params.bad_words_token_ids)
    if params.allowed_token_ids or longer or len(found) > EDITS or len({token for token, _, _ in found}) < len(found):
        return None
    return found


def _has_always(params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.allowed_token_ids or params.bad_words_token_ids)


def _has_lists(params: SamplingParams) -> bool:
    return _has_always(params) or bool(params.min_tokens or params.begin_suppress_token_ids)


def _edit(nth: int) -> Callable[[SamplingParams], list[float]]:
    """That entry of all edits, padded."""

    def of_params(params: SamplingParams) -> list[float]:
        found = [edit[nth] for edit in edits(params) or ()]
        return found + [0] * (EDITS - len(found))

    return of_params


def _is_penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _by_torch_until(params: SamplingParams) -> int:
    """The output index before which tokens need more than kernels/penalties, top_k_top_p and sample do."""
    if edits(params) is not None:
        return 0
    return ALWAYS if _has_always(params) else params.min_tokens or 1


def longest_repetition(params: SamplingParams) -> int:
    """The length of a repetition that a longer one is no worse than: DRY's penalty stays a float32, as in llama.cpp."""
    most = int(MAX_LOG / math.log(params.dry_base)) if params.dry_base > 1.000001 else ALWAYS
    return min(ALWAYS, params.dry_allowed_length + most)


def dry_last_n(params: SamplingParams) -> int:
    """The last tokens that DRY looks at."""
    return ALWAYS if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n


COLUMNS = (
    Column("num_prompt_tokens", np.int32, None),
    # tokens that are no drafts: of a new row; where drafts are verified without waiting, its device goes on from there
    Column("num_known", np.int32, None),
    _field("temperature", np.float32),
    Column("min_p", np.float32, lambda params: 0.0 if params.truncates_as_llama else params.min_p),
    Column("top_k", np.int32, lambda params: 0 if params.truncates_as_llama else max(0, params.top_k)),  # 0: off
    Column("top_p", np.float32, lambda params: 1.0 if params.truncates_as_llama else params.top_p),
    _field("seed", np.uint64),
    _field("repetition_penalty", np.float32),
    _field("presence_penalty", np.float32),
    _field("frequency_penalty", np.float32),
    _field("top_n_sigma", np.float32),  # these of kernels/llama_samplers
    Column("chain_top_k", np.int32, lambda params: max(0, params.top_k)),
    _field("typical_p", np.float32),
    Column("chain_top_p", np.float32, attrgetter("top_p")),
    Column("chain_min_p", np.float32, attrgetter("min_p")),
    _field("xtc_probability", np.float32),
    _field("xtc_threshold", np.float32),
    Column("dry_multiplier", np.float32, lambda params: params.dry_multiplier if params.repeats_less else 0.0),
    _field("dry_base", np.float32),
    _field("dry_allowed_length", np.int32),
    Column("dry_longest", np.int32, longest_repetition),
    Column("dry_last_n", np.int32, dry_last_n),
    Column("num_edits", np.int32, lambda params: len(edits(params) or ())),
    Column("edit_ids", np.int32, _edit(0), EDITS),
    Column("edit_adds", np.float32, _edit(1), EDITS),
    Column("edit_untils", np.int32, _edit(2), EDITS),
    # of a pair of texts: where the second begins; 0: there is none
    Column("second_from", np.int32, None, on_device=False),
    Column("adapter", np.int32, None),  # the slot of its adapter; 0: it has none
    Column("adapted_from", np.int32, None, on_device=False),  # the position of the first token that it changes
    Column("by_torch_until", np.int32, _by_torch_until, on_device=False),
    Column("has_lists", np.bool_, _has_lists, on_device=False),  # the general sampler looks at its ids
    Column("as_llama", np.bool_, lambda params: params.truncates_as_llama or params.repeats_less, on_device=False),
    Column("penalised", np.bool_, _is_penalised, on_device=False),
    _field("logprobs", np.int32, on_device=False),
    _field("prompt_logprobs", np.int32, on_device=False),
)
ON_DEVICE = tuple(column for column in COLUMNS if column.on_device)
ON_HOST = tuple(column for column in COLUMNS if not column.on_device)


def num_ints(column: Column) -> int:
    """The ints that a row's numbers take."""
    return np.dtype(column.dtype).itemsize // 4 * column.width


def _record(columns: tuple[Column, ...]) -> np.dtype[Any]:
    return np.dtype([(each.name, each.dtype, (each.width,) if each.width > 1 else ()) for each in columns])


def _value(column: Column, params: SamplingParams, of_plan: dict[str, int]) -> Any:
    if column.name in of_plan:
        return of_plan[column.name]
    return 0 if column.of_params is None else column.of_params(params)


class RowColumns(dict[str, NDArray[Any]]):
    """The columns of all rows on the host: a step picks its rows by indexing, without a loop over requests. `params`: all that a
    row's request asks for."""

    def __init__(self, max_rows: int) -> None:
        self._on_device, self._on_host = (np.zeros(max_rows, _record(columns)) for columns in (ON_DEVICE, ON_HOST))
        for column in COLUMNS:
            self[column.name] = (self._on_device if column.on_device else self._on_host)[column.name]
        self.params: dict[int, SamplingParams] = {}
        self.processors: ProcessLogits | None = None  # set by the engine
        self.logprobs_mode = "raw_logprobs"  # set by the engine, as the next (protocol/config/server.py)
        self.breakers: Tensor | None = None  # (rows/device_rows.py), where tokens are sampled
        self._write(slice(None), EMPTY, {})

    def set(self, row: int, params: SamplingParams, **of_plan: int) -> None:
        """A request takes this row. of_plan: the columns that its parameters do not say, or not alone."""
        self._write(row, params, of_plan)
        self.params[row] = params

    def _write(self, rows: int | slice, params: SamplingParams, of_plan: dict[str, int]) -> None:
        for records, columns in ((self._on_device, ON_DEVICE), (self._on_host, ON_HOST)):
            records[rows] = tuple(_value(column, params, of_plan) for column in columns)

    def reset(self) -> None:
        self.params.clear()

    def ints(self, row: int) -> NDArray[np.int32]:
        """The numbers of a row that the device has, as ints, one column after the other."""
        found: NDArray[np.int32] = self._on_device[row : row + 1].view(np.int32)
        return found

    def prompts_with_logprobs(self, rows: NDArray[np.int32], starts: NDArray[np.int32]) -> NDArray[np.intp]:
        """Tells which of these rows want log-probabilities of prompt tokens that follow positions from `starts` on."""
        return np.flatnonzero((self["prompt_logprobs"][rows] >= 0) & (starts < self["num_prompt_tokens"][rows] - 1))

    def need_torch(self, rows: NDArray[np.int32], output_index: NDArray[np.int64]) -> NDArray[np.intp]:
        """Tells which of these rows ask for more than kernels/penalties, top_k_top_p and sample do, for the token of this index."""
        return np.flatnonzero(self["by_torch_until"][rows] > output_index)
