"""The shape of a model as data: read once from its files, known to every process, without torch."""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol.audio import HOP


class RopeSpec(Struct, frozen=True, kw_only=True):
    """Rotary position embedding. Field names are Hugging Face's `rope_scaling` / `rope_parameters`."""

    rope_type: str = "default"  # default, linear, dynamic, llama3, yarn, longrope, proportional
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # 0: the model's max_position_embeddings
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    attention_factor: float | None = None  # yarn, longrope
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope

    def rotary_dim(self, head_dim: int) -> int:
        """Numbers of a head that are rotated, of so many; proportional: all of them, most by an angle of zero."""
        return head_dim if self.rope_type == "proportional" else int(head_dim * self.partial_rotary_factor)


class QuantizationScheme(Struct, frozen=True, kw_only=True):
    """How linear layers of these names are quantised."""

    targets: tuple[str, ...]  # "Linear": all; a name or a part of it at dots; "re:" and a regular expression
    weight: Literal["tensor", "channel", "block", "group"]  # what has a scale of its own
    block: tuple[int, int] = (0, 0)  # outputs and inputs of a block
    activation: Literal["none", "static", "token", "group"]  # one scale that a file has, or one found for each token
    group: int = 0  # inputs that have a scale together
    integers: bool = (
        False  # weights and activations are 8-bit integers, not floats; `zeros`: activations have zero points
    )
    bits: int = 8  # of a weight; with less than 8, or with weight "group", several codes share a word
    weight_group: int = 0  # inputs of a weight's row that share a scale; -1: all
    zeros: bool = False  # files hold a zero point for each scale
    symmetric: bool | None = None  # zero points are the middle of the codes; None: files do not say
    files: Literal["", "gptq", "gptq_v2", "awq", "compressed-tensors", "bitsandbytes", "mxfp4"] = (
        ""  # how they lay out words of codes
    )
    values: Literal["integers", "nf4", "fp4", "mxfp4"] = "integers"  # that codes stand for
    act_order: bool = False  # files say which group each input belongs to
    num_groups: int = 0  # of a whole row, which a rank may have a part of
    projections: int = 1  # of the checkpoint that are one product here
    online: bool = False  # files hold floats, which are quantised while they are loaded


class QuantizationSpec(Struct, frozen=True, kw_only=True):
    """How the weights of a checkpoint are quantised."""

    method: str  # quant_method: fp8, compressed-tensors, a plug-in's
    schemes: tuple[QuantizationScheme, ...]  # the first that has a layer as its target counts
    ignore: tuple[str, ...] = ()  # targets that are not quantised
    weight_scale: str = "weight_scale"  # what files call the scales of weights


class MoESpec(Struct, frozen=True, kw_only=True):
    """A mixture of experts in the place of a layer's MLP. Names are Hugging Face's, where families agree on one."""

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
    weights_on_input: bool = (
        False  # an expert's input is multiplied by its weight, not its output; with one expert a token
    )
    router_bias: bool = False  # of the router's product
    expert_bias: bool = False  # of the experts' products
    gated: bool = True  # experts have a gate; without one hidden_act is of what goes down
    sparse_mixer: float = 0.0  # the jitter of SparseMixer's training, where it chooses (workers/models/phimoe.py)
    swiglu: tuple[float, float] | None = None  # alpha and limit of gpt-oss' activation in the experts; None: hidden_act
    shared_intermediate_size: int = 0  # of all experts together that every token goes to; 0: there are none
    beside_mlp: bool = False  # experts stand beside a layer's MLP, not in its place
    shared_gate: bool = False  # their output is multiplied by the sigmoid of a product of its own
    moe_layers: tuple[bool, ...] = ()  # which layers have experts; empty: all
    local_experts: tuple[int, int] | None = None  # begin and end of those that a rank has; None: all
    redundant_experts: int = 0  # of a rank: slots beside those, for replicas of any


class MLASpec(Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: keys and values are projected up from one latent a token. Names are Hugging Face's."""

    kv_lora_rank: int  # of the latent
    qk_nope_head_dim: int  # of a head's key that comes from the latent
    qk_rope_head_dim: int  # of the rotated key, which all heads share
    v_head_dim: int
    q_lora_rank: int = 0  # 0: queries are projected at once
    index_topk: int = 0  # tokens that a query attends to: those that an index likes best; 0: all before it
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_interleave: bool = False  # neighbours of its queries and keys are turned together
    index_shared: tuple[
        bool, ...
    ] = ()  # by layer: it attends to what the last index before it has chosen; empty: none does

    @property
    def down(self) -> int:
        """Rows of the product that gives a token's latent and its rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def line(self) -> int:
        """Numbers that the KV cache keeps of a token in one layer: the index has a key of its own."""
        return self.down + self.index_head_dim


class StateSpec(Struct, frozen=True, kw_only=True):
    """Layers that keep one state of fixed size of each sequence. Names are Hugging Face's for Mamba-2.

    A state has `num_heads` matrices [head_dim, state_size], and the last inputs of a convolution of each of `conv_dim` channels.
    """

    kind: Literal["mamba", "mamba2", "gated_delta_net", "short_conv"]
    layers: tuple[bool, ...]  # which layers have it
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
        """Channels of the convolution."""
        return self.inner + (0 if self.kind in ("mamba", "short_conv") else 2 * self.n_groups * self.state_size)


class AltUpSpec(Struct, frozen=True, kw_only=True):
    """Several residuals of a token, and a vector of it for each layer (Gemma 3n). Names are Hugging Face's."""

    altup_num_inputs: int  # residuals
    altup_active_idx: int  # the one that layers compute
    altup_correct_scale: bool
    laurel_rank: int
    hidden_size_per_layer_input: int
    vocab_size_per_layer_input: int
    activation_sparsity_pattern: tuple[float, ...]  # by layer: the part of an MLP's gates that is to be zero


class AudioEncoderSpec(Struct, frozen=True, kw_only=True):
    """The audio encoder of a speech-to-text model (Whisper). Names are Hugging Face's."""

    num_mel_bins: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    max_source_positions: int  # encoder states of a request, to which each layer of the decoder attends
    suppress_tokens: tuple[int, ...] = ()  # that the decoder never writes

    @property
    def num_samples(self) -> int:
        """Samples of the audio that it takes: shorter ones are followed by silence. Two windows make a state."""
        return 2 * self.max_source_positions * HOP


class FullHeadsSpec(Struct, frozen=True, kw_only=True):
    """The heads of layers that see all, where layers that slide have others (Gemma 4)."""

    num_key_value_heads: int
    head_dim: int
    attention_k_eq_v: bool = False  # values are what keys are before their norm and rotation


class PerLayerInputSpec(Struct, frozen=True, kw_only=True):
    """A vector of each token for each layer (Gemma 4). Names are Hugging Face's."""

    hidden_size_per_layer_input: int
    vocab_size_per_layer_input: int


class HeadSpec(Struct, frozen=True, kw_only=True):
    """A classifier of pooled states: products, each but the last followed by its function and perhaps a layer norm."""

    num_labels: int
    layers: int = 1  # products; those before the last keep the hidden size
    bias: tuple[bool, ...] = (False,)  # of each product
    act: str = ""  # between them: tanh, gelu, relu
    norm: bool = False  # behind the first product's function
    activation: Literal["softmax", "sigmoid", "none"] = "softmax"  # that makes scores of logits
    token_ids: tuple[
        int, ...
    ] = ()  # the output projection's rows of these tokens are the classifier's; two: their difference
    step_tag_id: int = -1  # tasks for tokens give the scores of this token alone; -1: of all


class TransformersSpec(Struct, frozen=True, kw_only=True):
    """A model that the transformers library computes, with our attention."""

    architecture: str  # of config.json
    config: str  # config.json with all overrides, as JSON
    trust_remote_code: bool = False  # code that comes with the model may run
    repository: str = ""  # of the hub, where the model is from there and its code is of another revision
    code_revision: str = ""
    not_split: str = ""  # why tensor-parallel ranks cannot split it; empty: they can
    not_staged: str = ""  # why its layers cannot be stages of a pipeline; empty: they can


class LayerNormSpec(Struct, frozen=True, kw_only=True):
    """A decoder with layer norms: the order in its layers, and what stands before the first and behind the last of them."""

    parallel: int = 0  # attention and MLP stand beside one another, behind so many norms; 0: one behind the other
    after: bool = False  # norms stand behind the sums, and none behind the last layer
    gated: bool = False  # the MLP has a gate
    affine: bool = True  # norms have weights
    learned_positions: bool = False  # embeddings of positions are added to those of tokens
    embedding_norm: bool = False  # embeddings are normed
    embedding_dim: int = 0  # of the tables, which are projected to the hidden size and from it; 0: they have that size
    head_bias: bool = False  # logits have a bias


class ModelSpec(Struct, frozen=True, kw_only=True):
    """The shape of a transformer. Field names are Hugging Face's."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: RopeSpec = RopeSpec()
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of q, k, v
    output_bias: bool = False  # of o
    mlp_bias: bool = False
    qk_norm: bool = False
    alibi_slopes: tuple[float, ...] = ()  # by head: what scores lose by each token between query and key; none: nothing
    clip_qkv: float = 0.0  # queries, keys and values are no further from 0 than this; 0: none
    sliding_window: int = 0  # 0: full attention
    sliding_layers: tuple[bool, ...] = ()  # which layers slide; empty: all, if sliding_window
    sliding_rope: RopeSpec | None = None  # of layers that slide; None: rope
    attention_chunk_size: int = (
        0  # sliding_layers see their own chunk of so many tokens, and no window; 0: there are no chunks
    )
    no_rope_layers: tuple[bool, ...] = ()  # which layers rotate nothing; empty: none
    query_pre_attn_scalar: float = 0.0  # scores are divided by its root; 0: by that of head_dim
    attn_logit_softcapping: float = 0.0  # 0: none
    attn_temperature: tuple[float, float] | None = (
        None  # scale and floor: queries grow with their position (Llama 4, Ministral 3)
    )
    attention_sinks: bool = False  # each head has one more logit, which takes part in the softmax's sum only
    final_logit_softcapping: float = 0.0
    logit_scale: float = 1.0  # what logits are multiplied by
    multipliers: tuple[float, ...] = ()  # that a family multiplies into its weights while they load
    dtype: str = "float32"
    quantization: QuantizationSpec | None = None
    moe: MoESpec | None = None
    num_nextn_predict_layers: int = 0  # that a checkpoint has behind the last, and that are not loaded
    altup: AltUpSpec | None = None
    full_heads: FullHeadsSpec | None = None  # of layers that see all; None: all layers have the same heads
    per_layer_input: PerLayerInputSpec | None = None
    use_double_wide_mlp: bool = False  # layers that share keys and values have MLPs of twice the intermediate size
    num_kv_shared_layers: int = 0  # so many of the last layers use keys and values of an earlier one: see kv_source
    mla: MLASpec | None = None  # head_dim is that of queries then, and the one key-value head is the latent
    text_part: bool = False  # the checkpoint also has parts for images or audio, which are not loaded
    encoder_only: bool = False  # each token sees all tokens of its prompt, and there is no KV cache
    type_vocab_size: int = 0  # of an encoder: kinds of tokens, of which a pair's second text is another
    position_offset: int = 0  # the row of the position table that the first token gets
    norm_bias: bool = False  # layer norms have a bias
    xielu: tuple[tuple[float, ...], ...] = ()  # by layer: the numbers of Apertus' activation, where they are no tensors
    layer_norms: LayerNormSpec | None = None  # of decoders that have them; None: RMS norms
    lexical: Literal["", "bge-m3", "splade"] = ""
    """Of an encoder: what it knows of the weight of words. bge-m3: products in files of their own, beside one for tokens' vectors;
    splade: the head of the masked language model."""
    projection: int = 0  # of an encoder: numbers to which tokens' states are projected (ColBERT); 0: they are not
    head: HeadSpec | None = None  # a classifier of pooled states, in the place of the output projection

    state: StateSpec | None = None
    attention_layers: tuple[bool, ...] = ()  # which layers have attention; empty: all
    mlp_layers: tuple[bool, ...] = ()  # which layers have an MLP or experts; empty: all
    transformers: TransformersSpec | None = None
    audio_encoder: AudioEncoderSpec | None = None  # to whose output each layer attends, beside the tokens before

    def has_attention(self, layer: int) -> bool:
        """Whether this layer attends to earlier tokens."""
        return not self.attention_layers or self.attention_layers[layer]

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values this one uses: itself, or the last one of its kind before those that share."""
        first = self.num_hidden_layers - self.num_kv_shared_layers
        if layer < first:
            return layer
        return max(one for one in range(first) if self.slides(one) == self.slides(layer))

    def slides(self, layer: int) -> bool:
        """Whether this layer has a sliding window."""
        return self.sliding_layers[layer] if self.sliding_layers else self.sliding_window > 0

    def of_layer(self, layer: int) -> "ModelSpec":
        """The model as if all its layers had the heads and the MLP of this one."""
        found = self
        if self.full_heads is not None and not self.slides(layer):
            heads = self.full_heads
            found = replace(found, num_key_value_heads=heads.num_key_value_heads, head_dim=heads.head_dim)
        if self.use_double_wide_mlp and self.kv_source(layer) != layer:
            found = replace(found, intermediate_size=2 * self.intermediate_size)
        return found

    def has_cache(self, layer: int) -> bool:
        """Whether this layer keeps keys and values of its own."""
        return self.has_attention(layer) and self.kv_source(layer) == layer

    def has_mlp(self, layer: int) -> bool:
        """Whether this layer has an MLP or experts."""
        return not self.mlp_layers or self.mlp_layers[layer]

    def has_state(self, layer: int) -> bool:
        """Whether this layer keeps a state of the sequence."""
        return self.state is not None and self.state.layers[layer]

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has a mixture of experts, in the place of its MLP or beside it."""
        return self.moe is not None and (not self.moe.moe_layers or self.moe.moe_layers[layer])

    def wide_sizes(self, *, whole_experts: bool = False) -> tuple[int, ...]:
        """Columns between gate and down that tensor-parallel ranks split. whole_experts: they split those of none."""
        if self.moe is None:
            return (self.intermediate_size,)
        every = range(self.num_hidden_layers)
        dense = (self.intermediate_size,) if self.moe.beside_mlp or not all(map(self.has_experts, every)) else ()
        own = () if whole_experts else (self.moe.moe_intermediate_size,)
        shared = (self.moe.shared_intermediate_size,) if self.moe.shared_intermediate_size else ()
        return dense + own + shared

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated, of layers that see all where they have heads of their own."""
        if self.mla:
            return self.mla.qk_rope_head_dim
        return self.rope.rotary_dim(self.full_heads.head_dim if self.full_heads else self.head_dim)

    @property
    def kv_bytes_per_token_f32(self) -> int:
        """Bytes that the KV cache keeps of one token over all layers in float32."""
        if self.mla is not None:
            return self.num_hidden_layers * self.mla.line * 4
        layers = [self.of_layer(layer) for layer in range(self.num_hidden_layers) if self.has_cache(layer)]
        return sum(2 * layer.num_key_value_heads * layer.head_dim * 4 for layer in layers)
