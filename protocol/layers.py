"""A layer of a model as data: what mixes its tokens, what computes each of them alone, and whose keys and values it reads.

`Layers` holds those of a model. Most layers are alike, so each different record stands there once, also in messages.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from msgspec import Struct

MAX_LAYERS = 1 << 13


class MLASpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Multi-head latent attention (DeepSeek-V2): keys and values are projected up from one latent a token. Names are Hugging Face's."""

    kv_lora_rank: int  # of the latent
    qk_nope_head_dim: int  # of a head's key that comes from the latent
    qk_rope_head_dim: int  # of the rotated key, which all heads share
    v_head_dim: int
    q_lora_rank: int = 0  # 0: queries are projected at once
    index_topk: int = 0  # tokens that a query attends to: those that an index likes best; 0: all before it
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_interleave: bool = False  # neighbours of its queries and keys are turned together
    index_shared: bool = False  # the layer attends to what the last index before it has chosen

    @property
    def down(self) -> int:
        """Rows of the product that gives a token's latent and its rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def line(self) -> int:
        """Numbers that the KV cache keeps of a token in one layer: the index has a key of its own."""
        return self.down + self.index_head_dim


class Attention(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Softmax attention to earlier tokens. The number of query heads is the model's."""

    num_key_value_heads: int
    head_dim: int
    sliding_window: int = 0  # tokens that a token sees, itself included; 0: all before it
    # a text is cut into chunks of so many tokens, and a token sees its own; 0: it is not cut
    attention_chunk_size: int = 0
    rotates: bool = True  # queries and keys, by the model's rope, or its sliding_rope in a layer with a window
    keys_are_values: bool = False  # values are what keys are before their norm and rotation
    mla: MLASpec | None = None  # head_dim is that of queries then, and the one key-value head is the latent

    @property
    def slides(self) -> bool:
        """Whether a token does not see all tokens before it."""
        return self.sliding_window > 0 or self.attention_chunk_size > 0

    @property
    def numbers_kept(self) -> int:
        """Numbers that the KV cache keeps of a token."""
        return self.mla.line if self.mla else 2 * self.num_key_value_heads * self.head_dim


class StateSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A layer's state of fixed size of each sequence. Names are Hugging Face's for Mamba-2.

    A state has `num_heads` matrices [head_dim, state_size], and the last inputs of a convolution of each of `conv_dim` channels."""

    kind: (
        str  # mamba, mamba2, gated_delta_net, short_conv, or what a family's mixer in workers/models computes by itself
    )
    num_heads: int  # mamba, short_conv: channels; gated_delta_net: value heads
    head_dim: int  # mamba, short_conv: 1
    state_size: int  # gated_delta_net: numbers of a key; short_conv: 0
    n_groups: int = 1  # heads of B and C; gated_delta_net: of keys and queries
    conv_kernel: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    gated_norm: bool = True  # the gate's product is normed
    norm_before_gate: bool = False  # the norm stands before the gate
    chunk_size: int = 256  # tokens of a prompt that are computed together
    time_step_rank: int = 0  # mamba
    mixer_norm: Literal["none", "plain", "weighted"] = "none"  # mamba: of what the scan gets
    mixer_norm_eps: float = 1e-6  # where it has no weights; else that of all norms
    time_step_limit: tuple[float, float | None] = (0.0, None)  # None: no upper one; JSON has no infinity
    dtype: str = "auto"  # of the states in the cache, where the checkpoint says one

    @property
    def inner(self) -> int:
        """Numbers of a token between the projections."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.inner + (2 * self.n_groups * self.state_size if self.kind in ("mamba2", "gated_delta_net") else 0)


class MLP(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What computes each token of a layer alone."""

    intermediate_size: int
    sparsity: float = 0.0  # the share of its gates that is to be zero (Gemma 3n)
    xielu: tuple[float, ...] = ()  # the numbers of Apertus' activation, where they are no tensors


class MoESpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A mixture of experts, in the place of a layer's MLP or beside it. Names are Hugging Face's, where families agree on one."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # of one expert
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"  # over all experts, in float32
    norm_topk_prob: bool = False  # the chosen experts' weights are divided by their sum
    routed_scaling_factor: float = 1.0  # and multiplied by this
    n_group: int = 1  # groups of experts, of which the best topk_group may be chosen from
    topk_group: int = 1
    group_score: Literal["max", "top2"] = "max"  # of a group: its best expert's, or the sum of its best two
    correction_bias: bool = False  # e_score_correction_bias is added to scores for the choice, not for the weights
    weights_on_input: bool = False  # with one expert a token: its input is multiplied by its weight, not its output
    router_bias: bool = False  # of the router's product
    expert_bias: bool = False  # of the experts' products
    gated: bool = True  # experts have a gate; without one hidden_act is of what goes down
    sparse_mixer: float = 0.0  # the jitter of SparseMixer's training, where it chooses (workers/models/layer_norm.py)
    swiglu: tuple[float, float] | None = None  # alpha and limit of gpt-oss' activation in the experts; None: hidden_act
    shared_intermediate_size: int = 0  # of all experts together that every token goes to; 0: there are none
    shared_gate: bool = False  # their output is multiplied by the sigmoid of a product of its own
    local_experts: tuple[int, int] | None = None  # begin and end of those that a rank has; None: all
    redundant_experts: int = 0  # of a rank: slots beside those, for replicas of any


class LayerSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One layer. Attention and a state may stand beside one another, and so may an MLP and experts."""

    attention: Attention | None = None
    state: StateSpec | None = None
    cross_attention: int = 0  # so many states of an encoder's, to which the layer attends; 0: to none
    mlp: MLP | None = None
    experts: MoESpec | None = None
    cache_of: int | None = None  # the earlier layer whose keys and values it attends to; None: it has its own

    @property
    def has_cache(self) -> bool:
        return self.attention is not None and self.cache_of is None

    @property
    def intermediate_size(self) -> int:
        """Columns between gate and down; 0: there is no MLP."""
        return self.mlp.intermediate_size if self.mlp is not None else 0


class Layers(Struct, frozen=True):
    """The layers of a model: each different record once, and the number of its record for each layer."""

    kinds: tuple[LayerSpec, ...]
    order: tuple[int, ...]

    @classmethod
    def from_records(cls, records: Iterable[LayerSpec]) -> "Layers":
        """The layers that have these records, from the first on."""
        numbers: dict[LayerSpec, int] = {}
        order = tuple(numbers.setdefault(record, len(numbers)) for record in records)
        return cls(tuple(numbers), order)

    @classmethod
    def alike(cls, record: LayerSpec, count: int) -> "Layers":
        """So many layers with this record. ValueError."""
        if not 0 < count <= MAX_LAYERS:
            limit = "it must be positive" if count < 1 else f"it may be {MAX_LAYERS} at most"
            raise ValueError(f"num_hidden_layers is {count}; {limit}")
        return cls((record,), (0,) * count)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, layer: int) -> LayerSpec:
        return self.kinds[self.order[layer]]

    def __iter__(self) -> Iterator[LayerSpec]:
        return (self.kinds[number] for number in self.order)
