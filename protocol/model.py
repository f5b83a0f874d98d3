"""The shape of a model as data: read once from its files, known to every process, without torch."""

from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol.audio import HOP
from meshlm.protocol.layers import Attention, Layers, LayerSpec, MLASpec, MoESpec, StateSpec
from meshlm.protocol.media_spec import MediaSpec


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
    # weights and activations are 8-bit integers, not floats; `zeros`: activations have zero points
    integers: bool = False
    bits: int = 8  # of a weight; with less than 8, or with weight "group", several codes share a word
    weight_group: int = 0  # inputs of a weight's row that share a scale; -1: all
    zeros: bool = False  # files hold a zero point for each scale
    symmetric: bool | None = None  # zero points are the middle of the codes; None: files do not say
    # how they lay out words of codes
    files: Literal["", "gptq", "gptq_v2", "awq", "compressed-tensors", "bitsandbytes", "mxfp4"] = ""
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


class AltUpSpec(Struct, frozen=True, kw_only=True):
    """Several residuals of a token, and a vector of it for each layer (Gemma 3n). Names are Hugging Face's."""

    altup_num_inputs: int  # residuals
    altup_active_idx: int  # the one that layers compute
    altup_correct_scale: bool
    laurel_rank: int
    hidden_size_per_layer_input: int
    vocab_size_per_layer_input: int


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


class PerLayerInputSpec(Struct, frozen=True, kw_only=True):
    """A vector of each token for each layer (Gemma 4). Names are Hugging Face's."""

    hidden_size_per_layer_input: int
    vocab_size_per_layer_input: int
    padding_id: int = 0  # the token whose rows of the table an image's vectors have


class HeadSpec(Struct, frozen=True, kw_only=True):
    """A classifier of pooled states: products, each but the last followed by its function and perhaps a layer norm."""

    num_labels: int
    layers: int = 1  # products; those before the last keep the hidden size
    bias: tuple[bool, ...] = (False,)  # of each product
    act: str = ""  # between them: tanh, gelu, relu
    norm: bool = False  # behind the first product's function
    activation: Literal["softmax", "sigmoid", "none"] = "softmax"  # that makes scores of logits
    # the output projection's rows of these tokens are the classifier's; two: their difference
    token_ids: tuple[int, ...] = ()
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


class DraftSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a drafter has that reads the states of the model that it drafts for, its target. The model's layers are the drafter's."""

    method: Literal["mtp", "eagle", "eagle3"]
    first_layer: int = 0  # mtp: the number in the checkpoint of its first layer
    prefix: str = ""  # mtp: of its tensors' names; "": its layers stand behind the target's
    target_hidden_size: int = 0  # numbers of a target's state; 0: hidden_size
    taps: tuple[int, ...] = ()
    """eagle3: it reads the target's states behind so many layers each; empty: where the number of the target's layers says."""
    draft_vocab_size: int = 0  # tokens of its own output projection; 0: it is the target's
    norm_before_residual: bool = False  # eagle3: the residual begins with normed states
    fc_bias: bool = False  # eagle: of the product that makes one state of an embedding and a target's state


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
    """The shape of a transformer: its layers, and what they share. Field names are Hugging Face's."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: Layers
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: RopeSpec = RopeSpec()
    sliding_rope: RopeSpec | None = None  # of layers with a window; None: rope
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of q, k, v
    output_bias: bool = False  # of o
    mlp_bias: bool = False
    qk_norm: bool = False
    alibi_slopes: tuple[float, ...] = ()  # by head: what scores lose by each token between query and key; none: nothing
    clip_qkv: float = 0.0  # queries, keys and values are no further from 0 than this; 0: none
    query_pre_attn_scalar: float = 0.0  # scores are divided by its root; 0: by that of head_dim
    attn_logit_softcapping: float = 0.0  # 0: none
    attn_temperature: tuple[float, float] | None = None
    """Scale and floor: queries grow with their position (Llama 4, Ministral 3)."""
    attention_sinks: bool = False  # each head has one more logit, which takes part in the softmax's sum only
    final_logit_softcapping: float = 0.0
    logit_scale: float = 1.0  # what logits are multiplied by
    multipliers: tuple[float, ...] = ()  # that a family multiplies into its weights while they load
    dtype: str = "float32"
    quantization: QuantizationSpec | None = None
    # that a checkpoint has behind the last; they draft, and are no part of this model
    num_nextn_predict_layers: int = 0
    num_draft_layers: int = 0  # the last ones are a drafter's
    altup: AltUpSpec | None = None
    per_layer_input: PerLayerInputSpec | None = None
    text_part: bool = False  # the checkpoint also has parts for images or audio, which are no layers of this model
    media: MediaSpec | None = None  # the images that it takes beside text; None: it takes none
    encoder_only: bool = False  # each token sees all tokens of its prompt, and there is no KV cache
    type_vocab_size: int = 0  # of an encoder: kinds of tokens, of which a pair's second text is another
    position_offset: int = 0  # the row of the position table that the first token gets
    norm_bias: bool = False  # layer norms have a bias
    layer_norms: LayerNormSpec | None = None  # of decoders that have them; None: RMS norms
    lexical: Literal["", "bge-m3", "splade"] = ""
    """Of an encoder: what it knows of the weight of words. bge-m3: products in files of their own, beside one for tokens' vectors;
    splade: the head of the masked language model."""
    projection: int = 0  # of an encoder: numbers to which tokens' states are projected (ColBERT); 0: they are not
    head: HeadSpec | None = None  # a classifier of pooled states, in the place of the output projection
    transformers: TransformersSpec | None = None
    audio_encoder: AudioEncoderSpec | None = None  # to whose output layers attend, beside the tokens before
    draft: DraftSpec | None = None  # of a drafter that reads another model's states

    def with_drafter(self, drafter: "ModelSpec | None") -> "ModelSpec":
        """With the layers of a drafter behind its own: whose caches are to be had."""
        if drafter is None:
            return self
        count, own = len(self.layers), [*self.layers]
        behind = [
            replace(layer, cache_of=None if layer.cache_of is None else count + layer.cache_of)
            for layer in drafter.layers
        ]
        layers = Layers.from_records([*own, *behind])
        return replace(self, layers=layers, num_draft_layers=len(behind))

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each layer that attends to earlier tokens."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def attention(self) -> Attention | None:
        """The attention of the first layer that attends; None: no layer does."""
        return next(iter(self.attentions), None)

    @property
    def num_key_value_heads(self) -> int:
        """Key-value heads of the first layer that attends; 0: no layer does."""
        return self.attention.num_key_value_heads if self.attention else 0

    @property
    def head_dim(self) -> int:
        """The head size of the first layer that attends; 0: no layer does."""
        return self.attention.head_dim if self.attention else 0

    @property
    def full_head_dim(self) -> int:
        """The head size of layers that see all, where some do."""
        return next((one.head_dim for one in self.attentions if not one.slides), self.head_dim)

    @property
    def sliding_head_dim(self) -> int:
        """The head size of layers with a window, where some have one."""
        return next((one.head_dim for one in self.attentions if one.slides), self.head_dim)

    @property
    def sliding_window(self) -> int:
        """The window of layers that have one; 0: none has."""
        return max((one.sliding_window for one in self.attentions), default=0)

    @property
    def intermediate_size(self) -> int:
        """Columns between gate and down of the first layer that has an MLP; 0: no layer has one."""
        return next((layer.mlp.intermediate_size for layer in self.layers if layer.mlp), 0)

    @property
    def mla(self) -> MLASpec | None:
        """How layers attend to latents; None: they have keys and values."""
        return self.attention.mla if self.attention else None

    @property
    def state(self) -> StateSpec | None:
        """The shape of the states that layers keep of a sequence; None: none keeps one."""
        return next((layer.state for layer in self.layers if layer.state), None)

    @property
    def moe(self) -> MoESpec | None:
        """The shape of the mixtures of experts; None: no layer has one."""
        return next((layer.experts for layer in self.layers if layer.experts), None)

    def rope_of(self, attention: Attention) -> RopeSpec:
        return self.sliding_rope if self.sliding_rope is not None and attention.slides else self.rope

    def with_layers(self, change: Callable[[LayerSpec], LayerSpec], which: Iterable[bool] = ()) -> "ModelSpec":
        """The model with another record for the layers that `which` names, from the first on; empty: for all of them."""
        chosen = tuple(which) or (True,) * len(self.layers)
        pairs = zip(self.layers, chosen, strict=True)
        return replace(self, layers=Layers.from_records(change(one) if changes else one for one, changes in pairs))

    def with_state_dtype(self, dtype: str) -> "ModelSpec":
        """The model whose cache holds states in this type."""

        def changed(layer: LayerSpec) -> LayerSpec:
            return layer if layer.state is None else replace(layer, state=replace(layer.state, dtype=dtype))

        return self.with_layers(changed)

    def wide_sizes(self, *, whole_experts: bool = False) -> tuple[int, ...]:
        """Columns between gate and down that tensor-parallel ranks split. whole_experts: they split those of none."""
        sizes = [layer.mlp.intermediate_size for layer in self.layers.kinds if layer.mlp is not None]
        if self.moe is not None:
            sizes += [] if whole_experts else [self.moe.moe_intermediate_size]
            sizes += filter(None, [self.moe.shared_intermediate_size])
        return tuple(dict.fromkeys(sizes))

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated, of layers that see all where some do."""
        if self.mla:
            return self.mla.qk_rope_head_dim
        return self.rope.rotary_dim(self.full_head_dim)

    @property
    def kv_bytes_per_token_f32(self) -> int:
        """Bytes that the KV cache keeps of one token over all layers in float32."""
        return sum(4 * layer.attention.numbers_kept for layer in self.layers if layer.attention and layer.has_cache)
