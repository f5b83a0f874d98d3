"""What a drafter is on a GPU: it launches kernels that guess the tokens behind each row's known ones, of which the device alone knows
how many there are. An engine has one at the most.
"""

from collections.abc import Callable, Hashable
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


class ComputedStep(NamedTuple):
    """A step that the model has computed."""

    key: Hashable | None  # of steps whose tensors are where these are; None: of no other
    batch: Callable[[], StepInputs]  # makes its tokens again, with the padding that it had


class Kept(NamedTuple):
    """What a step's requests have got; those that are padding: the dummy row, and any number."""

    rows: Tensor  # int32 [n]
    firsts: Tensor  # int32 [n]: places of their first tokens that sample, among the step's
    counts: Tensor  # int32 [n]: tokens that they got; 0: it did not sample


class DeviceDrafter(Protocol):
    def draft(self, of: DraftedRows, found: Tensor) -> None:
        """Write drafts behind the known tokens of rows; found int32 [>= m] gets how many. All that may be drafted is verified, whatever
        stands there."""

    def computed(self, step: ComputedStep, kept: Kept) -> None:
        """What rows got of the step stands in them."""

    def forget_graphs(self) -> None:
        """Memory moves to other addresses."""

    def warm_up(self, full: list[int]) -> None:
        """Have all kernels compiled, once there are caches. full: lengths of the prompts of a largest step."""


class DeviceNgram:
    """As `NgramDrafter`; the device scans the rows."""

    def __init__(self, rows: DeviceRows, config: SpeculativeConfig) -> None:
        self._rows, self._shortest, self._longest = rows, config.prompt_lookup_min, config.prompt_lookup_max

    def draft(self, of: DraftedRows, found: Tensor) -> None:
        known, tokens = self._rows.columns["num_known"], self._rows.tokens
        kernel.ngram(of.rows, of.drafts, known, tokens, found, of.m, self._shortest, self._longest)

    def computed(self, step: ComputedStep, kept: Kept) -> None:
        """It reads rows alone."""

    def forget_graphs(self) -> None:
        """It has none."""

    def warm_up(self, full: list[int]) -> None:
        """See `DeviceVerification.warm_up`."""
