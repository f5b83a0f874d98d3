"""The .gguf files of Gemma 4: llama.cpp's keys, which give the heads of layers that see all as those of the model."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.dense import dense_gguf
from meshlm.architectures.family import GGUFFamily, GGUFMetadata, MetadataError
from meshlm.architectures.layers import sharing, with_attention, with_mlps, with_shared_caches
from meshlm.architectures.moe import GGUF_KEYS, gguf_moe
from meshlm.protocol.model import ModelSpec, PerLayerInputSpec, RopeSpec

_STILL = 1e29  # a frequency that is divided by so much turns nothing


def _spec(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    get, layers = metadata.get, int(metadata.get("block_count"))
    sliding = tuple(map(bool, _of_layers(get("attention.sliding_window_pattern"), layers, "sliding_window_pattern")))
    if sliding[-1]:
        raise MetadataError("attention.sliding_window_pattern: the last layer must see all")
    shared = int(get("attention.shared_kv_layers", 0))
    wide = _of_layers(get("feed_forward_length"), layers, "feed_forward_length")
    keys = _of_layers(get("attention.head_count_kv"), layers, "head_count_kv")
    own = {slides: {count for count, kind in zip(keys, sliding, strict=True) if kind == slides} for slides in (0, 1)}
    if any(len(counts) > 1 for counts in own.values()):
        raise MetadataError(f"attention.head_count_kv {keys} differs among layers of a kind")
    (full_keys,) = own[0]
    head_dim = int(get("attention.key_length_swa"))
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if int(get(key, head_dim)) != head_dim:
            raise MetadataError(f"{key} is {get(key)}; only {head_dim} is supported here")
    plain = {
        "feed_forward_length": wide[0],
        "attention.head_count_kv": own[1].pop() if own[1] else full_keys,
        "attention.key_length": head_dim,
    }
    fields = {**metadata.fields, **{f"{metadata.kind}.{key}": value for key, value in plain.items()}}
    spec = dense_gguf(metadata._replace(fields=fields, rope_factors=()), architecture)
    spec = with_attention(spec, sliding, sliding_window=int(get("attention.sliding_window")) if any(sliding) else 0)
    spec = with_shared_caches(spec, shared, "attention.shared_kv_layers", MetadataError)
    full = {
        "num_key_value_heads": full_keys,
        "head_dim": int(get("attention.key_length")),
        "keys_are_values": _keys_are_values(metadata, sliding, layers - shared),
    }
    spec = with_attention(spec, [not slides for slides in sliding], **full)
    if shared and wide[-1] == 2 * wide[0]:
        spec = with_mlps(spec, sharing(spec), intermediate_size=wide[-1])
    if [layer.intermediate_size for layer in spec.layers] != wide:
        raise MetadataError(
            f"feed_forward_length {wide}: layers that share keys and values may have twice that of others"
        )
    rope = replace(spec.rope, rope_type="proportional", partial_rotary_factor=_turning(metadata.rope_factors))
    spec = replace(
        spec,
        hidden_act="gelu_pytorch_tanh",
        query_pre_attn_scalar=1.0,
        qk_norm=True,
        rope=rope,
        sliding_rope=RopeSpec(rope_theta=float(get("rope.freq_base_swa", 10_000.0))),
        final_logit_softcapping=float(get("final_logit_softcapping", 0.0)),
        per_layer_input=_per_layer_input(metadata),
    )
    if int(get("expert_count", 0)):
        moe = gguf_moe(metadata._replace(fields=fields), norm_topk_prob=True)
        spec = spec.with_layers(lambda layer: replace(layer, experts=moe))
    return spec


def _of_layers(value: Any, layers: int, key: str) -> list[int]:
    """One number for each layer."""
    found = list(map(int, value)) if isinstance(value, list | tuple) else [int(value)] * layers
    if len(found) != layers:
        raise MetadataError(f"{key} names {len(found)} layers of {layers}")
    return found


def _turning(factors: tuple[float, ...]) -> float:
    """The part of a head's numbers that turns, in layers that see all: the others' frequencies are divided by a huge number."""
    turning = sum(factor == 1 for factor in factors)
    if any(factor != 1 for factor in factors[:turning]) or any(factor < _STILL for factor in factors[turning:]):
        raise MetadataError("rope_freqs.weight must have ones, and huge numbers behind them")
    return turning / len(factors) if factors else 1.0


def _keys_are_values(metadata: GGUFMetadata, sliding: tuple[bool, ...], own: int) -> bool:
    """own: the layers that share with none. Those that see all have no projection of values then."""
    without = {f"blk.{layer}.attn_v.weight" not in metadata.shapes for layer in range(own) if not sliding[layer]}
    if len(without) != 1:
        raise MetadataError("attn_v.weight is there in some of the layers that see all, and not in others")
    return without.pop()


def _per_layer_input(metadata: GGUFMetadata) -> PerLayerInputSpec | None:
    size = int(metadata.get("embedding_length_per_layer_input", 0))
    if not size:
        return None
    table = metadata.shapes.get("per_layer_token_embd.weight", ())
    if len(table) != 2 or table[0] < metadata.shapes["token_embd.weight"][0]:
        raise MetadataError("tensor per_layer_token_embd.weight is missing, or has fewer rows than token_embd.weight")
    return PerLayerInputSpec(hidden_size_per_layer_input=size, vocab_size_per_layer_input=table[0])


GEMMA4_GGUF = GGUFFamily(
    "gemma4",
    _spec,
    keys=GGUF_KEYS
    | {
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.shared_kv_layers",
        "attention.key_length_swa",
        "attention.value_length_swa",
        "rope.freq_base_swa",
        "rope.dimension_count_swa",
        "embedding_length_per_layer_input",
        "final_logit_softcapping",
    },
)
