"""What a drafter is on a GPU: it launches kernels that guess the tokens behind each row's known ones, of which the device alone knows
how many there are. An engine has one at the most.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from meshlm.kernels.verify import kernel
from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.workers.batch import StepInputs
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.step_columns import Verified


class DraftedRows(NamedTuple):
    """The m requests of a step."""

    rows: Tensor  # int32 [>= m]
    drafts: Tensor  # int32 [>= m]: so many at most; below 1: none
    m: int
    host: Verified  # the same, as the host knows it


class Kept(NamedTuple):
    """What m requests of a step have got."""

    rows: Tensor  # int32 [>= m]
    firsts: Tensor  # int32 [>= m]: places of their first tokens that sample, among the step's
    counts: Tensor  # int32 [>= m]: tokens that they got; 0: it did not sample
    m: int


class DeviceDrafter(Protocol):
    def draft(self, of: DraftedRows, found: Tensor) -> None:
        """Write drafts behind the known tokens of rows; found int32 [>= m] gets how many. All that may be drafted is verified, whatever
        stands there."""

    def computed(self, batch_of: Callable[[], StepInputs], kept: Kept) -> None:
        """The model has computed a step, whose tokens `batch_of` gives, and what rows got stands in them."""

    def warm_up(self, largest: int) -> None:
        """Have all kernels compiled, once there are caches. largest: tokens of a step."""


class DeviceNgram:
    """As `NgramDrafter`; the device scans the rows."""

    def __init__(self, rows: DeviceRows, config: SpeculativeConfig) -> None:
        self._rows, self._shortest, self._longest = rows, config.prompt_lookup_min, config.prompt_lookup_max

    def draft(self, of: DraftedRows, found: Tensor) -> None:
        known, tokens = self._rows.columns["num_known"], self._rows.tokens
        kernel.ngram(of.rows, of.drafts, known, tokens, found, of.m, self._shortest, self._longest)

    def computed(self, batch_of: Callable[[], StepInputs], kept: Kept) -> None:
        """It reads rows alone."""

    def warm_up(self, largest: int) -> None:
        """See `DeviceVerification.warm_up`."""
