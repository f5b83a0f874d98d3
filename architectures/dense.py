"""The common base of dense decoders: the sizes that their files give, and the weights of attention, gated MLP and embeddings."""

import math
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, layer_kinds, number, shown
from meshlm.architectures.family import GGUFMetadata, MetadataError
from meshlm.architectures.layers import with_attention
from meshlm.architectures.rope import gguf_rope, rope_spec, stretched
from meshlm.protocol.layers import MLP, Attention, Layers, LayerSpec
from meshlm.protocol.model import ModelSpec, RopeSpec

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}
ACTIVATIONS |= {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}  # the same formula
GGUF_SLIDING = frozenset(("attention.sliding_window", "attention.sliding_window_pattern"))


def dense_spec(config: dict[str, Any], architecture: str, rope: RopeSpec | None = None) -> ModelSpec:
    """The sizes that every config.json gives. rope: what the family has read itself. KeyError, ValueError."""
    heads, hidden, layers = (
        integer(config, key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    if heads < 1 or (config.get("head_dim") is None and hidden % heads):
        raise ValueError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and there is no head_dim"
        )
    context = integer(config, "max_position_embeddings")
    if rope is None:
        context, rope = stretched(context, rope_spec(config))
    bias = boolean(config, "attention_bias")
    return ModelSpec(
        architecture=architecture,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        layers=decoder_layers(
            layers,
            integer(config, "num_key_value_heads", heads),
            integer(config, "head_dim", hidden // heads),
            integer(config, "intermediate_size"),
        ),
        num_attention_heads=heads,
        max_position_embeddings=context,
        rms_norm_eps=number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        hidden_act=activation(config, "hidden_act"),
        rope=rope,
        tie_word_embeddings=boolean(config, "tie_word_embeddings"),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=boolean(config, "mlp_bias"),
        dtype=dtype_of(config),
    )


def decoder_layers(count: int, kv_heads: int, head_dim: int, intermediate_size: int) -> Layers:
    attention = Attention(num_key_value_heads=kv_heads, head_dim=head_dim)
    return Layers.alike(LayerSpec(attention=attention, mlp=MLP(intermediate_size=intermediate_size)), count)


def dtype_of(config: dict[str, Any]) -> str:
    """The type of numbers that a config.json says of its weights."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def full_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """`dense_spec`, of a family all whose layers see all tokens before. KeyError, ValueError."""
    spec = dense_spec(config, architecture)
    one_window(config, spec, slides=False)
    return spec


def windowed_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """`dense_spec`, of a family whose layers may all have the window. KeyError, ValueError."""
    spec = dense_spec(config, architecture)
    return with_attention(spec, sliding_window=one_window(config, spec, slides=True))


def activation(config: dict[str, Any], key: str, default: str = "silu") -> str:
    """The function between gate and up. ValueError."""
    act = config.get(key, default)
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise ValueError(f"{key} {shown(act)} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[act]


def sliding_window(config: dict[str, Any]) -> int:
    """Tokens that a sliding layer sees; 0 where all layers see all. ValueError."""
    window = integer(config, "sliding_window", 0)
    if window < 0:
        raise ValueError(f"sliding_window is {window}; it must be positive, or null")
    return window


def layer_types(config: dict[str, Any]) -> list[str] | None:
    """The kind of each layer, where the file names them. ValueError."""
    kinds, layers = config.get("layer_types"), integer(config, "num_hidden_layers")
    return None if kinds is None else layer_kinds(kinds, layers, ("full_attention", "sliding_attention"))


def sliding_layers(config: dict[str, Any], every: int) -> tuple[int, tuple[bool, ...]]:
    """The window, and which layers have it; 0 and none where none slides. every: of so many layers the last sees all, where the
    file does not name their kinds. ValueError."""
    window, kinds, layers = sliding_window(config), layer_types(config), integer(config, "num_hidden_layers")
    if kinds is not None:
        sliding = tuple(kind == "sliding_attention" for kind in kinds)
    else:
        sliding = tuple(bool(window) and (layer + 1) % every > 0 for layer in range(layers))
    if any(sliding) and not window:
        raise ValueError("sliding_window must be positive where layers slide")
    return (window, sliding) if any(sliding) else (0, ())


def one_window(config: dict[str, Any], spec: ModelSpec, *, slides: bool) -> int:
    """The window of a family whose layers are all alike. ValueError."""
    window, kinds = sliding_window(config), layer_types(config) or ()
    if window >= spec.max_position_embeddings:
        return 0
    wanted = "sliding_attention" if window and slides else "full_attention"
    if any(kind != wanted for kind in kinds) or (window and not slides):
        raise ValueError(f"sliding_window {window} with these layer_types is not supported for {spec.architecture}")
    return window


def dense_gguf(
    metadata: GGUFMetadata, architecture: str, eps: str = "attention.layer_norm_rms_epsilon", **family: Any
) -> ModelSpec:
    """The sizes that every .gguf file gives. eps: the key of the norms' epsilon. family: what llama.cpp knows of it, by field.
    MetadataError."""
    get, shapes = metadata.get, metadata.shapes
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise MetadataError("tensor token_embd.weight is missing, or no matrix")
    if int(get("block_count")) > len(shapes):
        raise MetadataError(f"metadata {metadata.kind}.block_count is {get('block_count')}, with {len(shapes)} tensors")
    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    drafts = int(get("nextn_predict_layers", 0))  # counted among the blocks
    if not 0 <= drafts < int(get("block_count")):
        raise MetadataError(f"metadata {metadata.kind}.nextn_predict_layers is {drafts}")
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        layers=decoder_layers(
            int(get("block_count")) - drafts,
            int(get("attention.head_count_kv", heads)),
            int(get("attention.key_length", hidden // heads)),
            int(get("feed_forward_length")),
        ),
        num_nextn_predict_layers=drafts,
        num_attention_heads=heads,
        max_position_embeddings=int(get("context_length")),
        rms_norm_eps=float(get(eps)),
        rope=gguf_rope(metadata),
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias=metadata.has("attn_q.bias"),
        output_bias=metadata.has("attn_output.bias"),
        dtype="float32",
    )
    return replace(spec, **family)


def layers_that_attend(metadata: GGUFMetadata) -> tuple[GGUFMetadata, tuple[bool, ...]]:
    """The metadata of a .gguf file with one number of key-value heads, and which layers attend: it is 0 of others. MetadataError."""
    layers, key = int(metadata.get("block_count")), f"{metadata.kind}.attention.head_count_kv"
    heads = metadata.get("attention.head_count_kv")
    heads = [int(count) for count in heads] if isinstance(heads, list) else [int(heads)] * layers
    if len(heads) != layers or len(set(heads) - {0}) > 1:
        raise MetadataError(f"metadata {key} is {shown(heads)}; it must be 0 or one number by layer")
    of_all = {**metadata.fields, key: max(heads) or int(metadata.get("attention.head_count"))}
    return metadata._replace(fields=of_all), tuple(count > 0 for count in heads)


def partly_rotated(spec: ModelSpec, metadata: GGUFMetadata) -> ModelSpec:
    """The spec of a family that turns so many numbers of each head as the .gguf file says. MetadataError."""
    rotary = int(metadata.get("rope.dimension_count", spec.head_dim))
    if not 0 < rotary <= spec.head_dim:
        raise MetadataError(f"metadata {metadata.kind}.rope.dimension_count is {rotary}, of heads of {spec.head_dim}")
    return replace(spec, rope=replace(spec.rope, partial_rotary_factor=partial_factor(rotary, spec.head_dim)))


def partial_factor(rotary: int, head_dim: int) -> float:
    """The part of a head that is turned, such that as many numbers come back of it."""
    factor = rotary / head_dim
    return factor if int(head_dim * factor) == rotary else math.nextafter(factor, 2.0)


def gguf_sliding(metadata: GGUFMetadata, spec: ModelSpec, every: int, window: int = 0) -> ModelSpec:
    """The spec with the window and the layers that slide, as the .gguf file says. every: of so many layers the last sees all, where
    the file names none; window: where it has none. MetadataError."""
    get, layers = metadata.get, spec.num_hidden_layers
    window = int(get("attention.sliding_window", window))
    if not window:
        return spec
    pattern = get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        sliding = tuple(map(bool, pattern[:layers]))
    else:
        sliding = tuple((layer + 1) % max(1, int(pattern)) > 0 for layer in range(layers))
    if len(sliding) != layers or window < 0:
        raise MetadataError(
            f"metadata {metadata.kind}.attention.sliding_window {window} with the pattern {shown(pattern)} "
            f"does not fit {layers} layers"
        )
    return with_attention(spec, sliding, sliding_window=window)
