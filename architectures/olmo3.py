"""OLMo 3 (OLMo Team 2025): OLMo 2 of which three layers in four slide; only those that see all are stretched by YaRN."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.dense import dense_spec, sliding_layers
from meshlm.architectures.family import Family
from meshlm.architectures.layers import with_attention
from meshlm.architectures.olmo2 import DEFAULTS, olmo_weights
from meshlm.architectures.rope import ropes_by_kind
from meshlm.protocol.model import ModelSpec

_EVERY = 4  # of so many layers the last sees all
_THETA = 500_000.0


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    theta = config.get("rope_theta") or _THETA
    rope, sliding_rope = ropes_by_kind(config, theta, theta)
    window, sliding = sliding_layers(config, _EVERY)
    spec = replace(dense_spec(config, architecture, rope), sliding_rope=sliding_rope)
    return with_attention(spec, sliding, sliding_window=window)


FAMILY = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    spec=_spec,
    weights=olmo_weights,
    defaults={**DEFAULTS, "sliding_window": 4096},
    compiles=False,
    model="meshlm.workers.models.post_norm:Olmo",
)
