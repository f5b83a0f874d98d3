"""The kit of a GPU with --deterministic: log-probabilities and the general sampler take one line at a time, as if each were alone (a
sum of torch's follows the number of lines and where they lie), and decodes share no prefixes."""

import torch

from meshlm.kernels.batch_invariant import gemm
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.triton_kit import TritonKit
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.output.logits_sampler import LogitsSampler
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.shared_prefixes import PrefixTables


class InvariantKit(TritonKit):
    def head(self, model: Decoder, rows: DeviceRows, dtype: torch.dtype, *, samples: bool) -> LogitsSampler:
        head = super().head(model, rows, dtype, samples=samples)
        head.alone = True
        return head

    def attention_wave(self, engine: ModelEngine) -> int:
        return 0

    def product_rows(self, engine: ModelEngine) -> set[int]:
        return gemm.warm_rows()

    def shared_prefixes(self, engine: ModelEngine) -> PrefixTables | None:
        return None

    def _self_test_attention(self, engine: ModelEngine, *, launched: bool) -> None:
        """There is one kernel of attention, which stands in for no other."""
