"""What a drafter is on a GPU: it launches kernels that guess the tokens behind each row's known ones, of which the device alone knows
how many there are. An engine has one at the most.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from meshlm.kernels.verify import kernel
from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.step_columns import Verified


class DraftedRows(NamedTuple):
    """The m requests of a step."""

    rows: Tensor  # int32 [>= m]
    drafts: Tensor  # int32 [>= m]: so many at most; below 1: none
    m: int
    host: Verified  # the same, as the host knows it


class DeviceDrafter(Protocol):
    def draft(self, of: DraftedRows, found: Tensor) -> None:
        """Write drafts behind the known tokens of rows; found int32 [>= m] gets how many. All that may be drafted is verified, whatever
        stands there."""


class DeviceNgram:
    """As `NgramDrafter`; the device scans the rows."""

    def __init__(self, rows: DeviceRows, config: SpeculativeConfig) -> None:
        self._rows, self._shortest, self._longest = rows, config.prompt_lookup_min, config.prompt_lookup_max

    def draft(self, of: DraftedRows, found: Tensor) -> None:
        known, tokens = self._rows.columns["num_known"], self._rows.tokens
        kernel.ngram(of.rows, of.drafts, known, tokens, found, of.m, self._shortest, self._longest)


def device_drafter_of(rows: DeviceRows, config: SpeculativeConfig) -> DeviceDrafter:
    """ProcessFatal where no drafter of this method is there for a GPU."""
    if config.method != "ngram":
        raise ProcessFatal(f"--speculative-config: method {config.method} drafts nothing on a GPU so far; use ngram")
    return DeviceNgram(rows, config)
