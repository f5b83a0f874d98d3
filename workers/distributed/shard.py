"""The part of the model that a worker has: its tensor-parallel rank within its pipeline stage. Pure arithmetic.

Workers of a scheduler are numbered stage by stage: worker index = (dp_rank * pp_size + pp_rank) * tp_size + tp_rank, as in vLLM.
Column-parallel products (query, key, value, gate, up, embedding rows, head) are split by rows of the weight, row-parallel ones (o,
down) by columns (Shoeybi et al. 2019, "Megatron-LM"). With more ranks than key-value heads, several ranks keep the same head.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from meshlm.protocol.config import ParallelConfig
from meshlm.protocol.layers import Layers, LayerSpec, MoESpec, StateSpec
from meshlm.protocol.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """One worker's part. The default is the whole model."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1  # ranks that have some experts whole each; 1: tensor-parallel ranks have a part of each expert
    redundant_experts: int = 0  # that this rank has slots for, beside its own

    @classmethod
    def of_worker(
        cls, parallel: ParallelConfig, worker: int, *, expert_parallel: bool = False, num_redundant: int = 0
    ) -> "Shard":
        """The part of worker number `worker` of the mesh. expert_parallel: experts are spread over all ranks of a stage, whole.

        num_redundant: slots for replicas of experts, of all ranks together."""
        tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        within = worker % parallel.workers_per_rank
        ep_rank, ep_size = 0, 1
        if expert_parallel:
            ep_rank = worker // parallel.workers_per_rank * tp_size + within % tp_size
            ep_size = parallel.data_parallel_size * tp_size
        return cls(within % tp_size, tp_size, within // tp_size, pp_size, ep_rank, ep_size, num_redundant // ep_size)

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def size(self) -> int:
        return self.pp_size * self.tp_size

    @property
    def is_first(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def reports(self) -> bool:
        """Sends the group's results to the scheduler."""
        return self.is_last and self.tp_rank == 0

    def layers(self, num_layers: int) -> range:
        each = num_layers // self.pp_size
        return range(self.pp_rank * each, (self.pp_rank + 1) * each)

    def heads(self, spec: ModelSpec) -> tuple[int, int]:
        """First query head, and the one after the last."""
        each = spec.num_attention_heads // self.tp_size
        return self.tp_rank * each, (self.tp_rank + 1) * each

    def kv_heads(self, count: int) -> tuple[int, int]:
        """First key-value head of a layer (or group of B and C) of so many, and the one after the last; with fewer than ranks, several
        ranks have the same."""
        if count >= self.tp_size:
            each = count // self.tp_size
            return self.tp_rank * each, (self.tp_rank + 1) * each
        head = self.tp_rank * count // self.tp_size
        return head, head + 1

    def shard_range(self, size: int) -> tuple[int, int]:
        """Begin and end of this rank's part of a dimension that tp_size divides."""
        each = size // self.tp_size
        return self.tp_rank * each, (self.tp_rank + 1) * each

    def experts(self, count: int) -> tuple[int, int]:
        """Begin and end of the experts that this rank has, of so many."""
        each = count // self.ep_size
        return self.ep_rank * each, (self.ep_rank + 1) * each

    def wide(self, size: int, *, of_expert: bool = False) -> tuple[int, int]:
        """Begin and end of this rank's part of the columns between gate and down."""
        return (0, size) if of_expert and self.ep_size > 1 else self.shard_range(size)

    def vocab(self, vocab_size: int) -> tuple[int, int, int]:
        """Begin and end of this rank's rows of embedding and head, and how many rows a rank has, padding included."""
        rows = -(-vocab_size // self.tp_size)
        begin = min(self.tp_rank * rows, vocab_size)
        return begin, min(begin + rows, vocab_size), rows

    def local(self, spec: ModelSpec) -> ModelSpec:
        """The shape of this part: its layers, heads and intermediate columns. The vocabulary stays whole."""
        own = self.layers(spec.num_hidden_layers)
        begin, end = self.heads(spec)
        return replace(
            spec,
            layers=Layers.from_records(self.local_layer(spec.layers[layer]) for layer in own),
            num_attention_heads=end - begin,
            alibi_slopes=spec.alibi_slopes[begin:end],
        )

    def local_layer(self, layer: LayerSpec) -> LayerSpec:
        attention, mlp = layer.attention, layer.mlp
        if attention is not None:
            first, last = self.kv_heads(attention.num_key_value_heads)
            attention = replace(attention, num_key_value_heads=last - first)
        if mlp is not None:
            mlp = replace(mlp, intermediate_size=mlp.intermediate_size // self.tp_size)
        state = None if layer.state is None else self.local_state(layer.state)
        experts = None if layer.experts is None else self._local_experts(layer.experts)
        return replace(layer, attention=attention, state=state, mlp=mlp, experts=experts)

    def local_state(self, state: StateSpec) -> StateSpec:
        """This rank's part of a state. Groups of B and C follow the heads; with fewer of them than ranks, several have the same."""
        groups = max(1, state.n_groups // self.tp_size)
        return replace(state, num_heads=state.num_heads // self.tp_size, n_groups=groups)

    def _local_experts(self, experts: MoESpec) -> MoESpec:
        begin, end = self.wide(experts.moe_intermediate_size, of_expert=True)
        return replace(
            experts,
            moe_intermediate_size=end - begin,
            shared_intermediate_size=experts.shared_intermediate_size // self.tp_size,
            local_experts=self.experts(experts.num_experts),
            redundant_experts=self.redundant_experts,
        )


WHOLE = Shard()
