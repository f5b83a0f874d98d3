"""The .gguf files of Gemma 3n: llama.cpp's keys, which give a gate's cut in deviations; some sizes are those of tensors."""

from statistics import NormalDist
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import shown
from meshlm.architectures.dense import dense_gguf
from meshlm.architectures.family import GGUFFamily, GGUFMetadata, MetadataError
from meshlm.architectures.layers import with_attention, with_shared_caches, with_sparsity
from meshlm.protocol.model import AltUpSpec, ModelSpec, RopeSpec

_LOCAL_THETA = 10_000.0
_TABLE, _LAUREL = "per_layer_token_embd.weight", "blk.0.laurel_l.weight"


def _spec(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    get, layers = metadata.get, int(metadata.get("block_count"))
    wide = _of_layers(metadata, "feed_forward_length", get("feed_forward_length"), layers)
    if len(set(wide)) != 1:
        raise MetadataError(f"feed_forward_length {shown(wide)} of layers that differ is not supported")
    fields = {**metadata.fields, f"{metadata.kind}.feed_forward_length": wide[0]}
    spec = dense_gguf(metadata._replace(fields=fields), architecture)
    sliding = tuple(
        map(
            bool,
            _of_layers(metadata, "attention.sliding_window_pattern", get("attention.sliding_window_pattern"), layers),
        )
    )
    spec = with_attention(spec, sliding, sliding_window=int(get("attention.sliding_window")) if any(sliding) else 0)
    key = "attention.shared_kv_layers"
    spec = with_shared_caches(with_sparsity(spec, _sparsity(metadata, layers)), int(get(key)), key, MetadataError)
    return replace(
        spec,
        hidden_act="gelu_pytorch_tanh",
        query_pre_attn_scalar=1.0,
        qk_norm=True,
        sliding_rope=RopeSpec(rope_theta=float(get("rope.freq_base_swa", _LOCAL_THETA))),
        final_logit_softcapping=float(get("final_logit_softcapping", 0.0)),
        altup=_altup(metadata),
    )


def _altup(metadata: GGUFMetadata) -> AltUpSpec:
    get, shapes = metadata.get, metadata.shapes
    for name in (_TABLE, _LAUREL):
        if len(shapes.get(name, ())) != 2:
            raise MetadataError(f"tensor {name} is missing, or no matrix")
    count, active = int(get("altup.num_inputs")), int(get("altup.active_idx"))
    if count < 2 or not 0 <= active < count:
        raise MetadataError(f"altup.num_inputs is {count}, altup.active_idx {active}, which no model can have")
    return AltUpSpec(
        altup_num_inputs=count,
        altup_active_idx=active,
        altup_correct_scale=True,
        laurel_rank=shapes[_LAUREL][0],
        hidden_size_per_layer_input=int(get("embedding_length_per_layer_input")),
        vocab_size_per_layer_input=shapes[_TABLE][0],
    )


def _sparsity(metadata: GGUFMetadata, layers: int) -> list[float]:
    """By layer: the share of an MLP's gates that is to be zero."""
    scales = _of_layers(metadata, "activation_sparsity_scale", metadata.get("activation_sparsity_scale"), layers)
    return [NormalDist().cdf(scale) for scale in scales]


def _of_layers(metadata: GGUFMetadata, key: str, value: Any, layers: int) -> list[Any]:
    """One number for each layer."""
    found = value if isinstance(value, list) else [value] * layers
    if len(found) != layers or not all(isinstance(one, int | float) for one in found):
        raise MetadataError(
            f"{metadata.kind}.{key} is {shown(value)}; it must be a number, or one for each of {layers} layers"
        )
    return found


GEMMA3N_GGUF = GGUFFamily(
    "gemma3n",
    _spec,
    keys=frozenset(
        (
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "attention.shared_kv_layers",
            "rope.freq_base_swa",
            "final_logit_softcapping",
            "altup.num_inputs",
            "altup.active_idx",
            "embedding_length_per_layer_input",
            "activation_sparsity_scale",
        )
    ),
)
