"""The drafter that --speculative-config names."""

from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.speculative.drafter import Drafter
from meshlm.workers.speculative.ngram import NgramDrafter


def drafter_of(config: SpeculativeConfig, rows: DeviceRows) -> Drafter:
    """Of rows whose tokens are on the host."""
    return NgramDrafter(rows.tokens.numpy(), config.prompt_lookup_min, config.prompt_lookup_max)
