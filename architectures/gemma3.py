"""Gemma 3, its text models (Gemma Team 2025): norms of query and key heads, five layers of six slide and rotate faster."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, words
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError
from meshlm.architectures.gemma2 import DEFAULTS, KEYS, gemma_gguf, gemma_spec, gemma_weights
from meshlm.architectures.layers import all_but_each, with_attention
from meshlm.architectures.rope import ropes_by_kind
from meshlm.protocol.model import ModelSpec, RopeSpec

_EVERY = 6  # of so many layers the last sees all
_LARGEST = 62  # layers of the 27B model, whose query scale a .gguf file does not say
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    # A file's context counts its scaled rotation already.
    rope, sliding_rope = ropes_by_kind(
        config, config.get("rope_theta") or _THETA, config.get("rope_local_base_freq") or _LOCAL_THETA
    )
    spec = gemma_spec(config, architecture, integer(config, "sliding_window_pattern", _EVERY), rope)
    return replace(spec, qk_norm=True, sliding_rope=sliding_rope)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec, get = gemma_gguf(metadata, architecture, largest=_LARGEST), metadata.get
    pattern = get("attention.sliding_window_pattern", _EVERY)
    sliding = all_but_each(pattern, spec.num_hidden_layers) if isinstance(pattern, int) else tuple(map(bool, pattern))
    if len(sliding) != spec.num_hidden_layers:
        raise MetadataError(f"attention.sliding_window_pattern names {len(sliding)} layers of {spec.num_hidden_layers}")
    return replace(
        with_attention(spec, sliding, sliding_window=int(get("attention.sliding_window"))),
        qk_norm=True,
        sliding_rope=RopeSpec(rope_theta=float(get("rope.freq_base_swa", _LOCAL_THETA))),
        final_logit_softcapping=float(get("final_logit_softcapping", 0.0)),
    )


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    spec=_spec,
    weights=gemma_weights,
    keys=(KEYS - {"attn_logit_softcapping"})
    | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
    defaults=DEFAULTS,
    gguf=GGUFFamily(
        "gemma3",
        _gguf,
        keys=words("""
        attention.sliding_window attention.sliding_window_pattern rope.freq_base_swa final_logit_softcapping
    """),
    ),
    float16=False,
    compiles=False,
    model="meshlm.workers.models.gemma:Gemma",
)
