"""The kit of a GPU with --deterministic: log-probabilities and the general sampler take one line at a time, as if each were alone (a
sum of torch's follows the number of lines and where they lie), and decodes share no prefixes."""

import torch

from meshlm.kernels.batch_invariant import gemm
from meshlm.kernels.batch_invariant.self_test import Layers, why_variant
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.triton_kit import TritonKit
from meshlm.workers.layers.elements import MLP
from meshlm.workers.models.decoder import Decoder, linears_of
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

    def warm_up(self, engine: ModelEngine) -> None:
        """ProcessFatal where the compiler has made kernels whose bits depend on what is computed beside."""
        super().warm_up(engine)
        if reason := why_variant(layers_of(engine)):
            raise ProcessFatal(f"--deterministic: on this GPU {reason}; leave it out")

    def _self_test_attention(self, engine: ModelEngine, *, launched: bool) -> None:
        """There is one kernel of attention, which stands in for no other."""


def layers_of(engine: ModelEngine) -> Layers:
    """What the self-test computes with: a weight of each size, and each kind of head and window."""
    spec, weights = engine.spec, dict[tuple[torch.Size, bool], torch.Tensor]()
    gated = {
        id(module.gate_up)
        for module in engine.model.modules()
        if isinstance(module, MLP) and spec.hidden_act == "silu" and module.gate_up.bias is None
    }
    for linear in linears_of(engine.model):
        weights.setdefault((linear.weight.shape, id(linear) in gated), linear.weight.data)
    kinds = {(spec.num_attention_heads, one.num_key_value_heads, one.head_dim) for one in spec.attentions}
    windows = {one.sliding_window for one in spec.attentions}
    longest = engine.rows.block_tables.shape[-1] * engine.rows.block_size
    found = [(weight, gate) for (_, gate), weight in weights.items()]
    return Layers(found, sorted(kinds), sorted(windows), engine.rows.block_size, longest)
