"""Rotary position embeddings as files describe them: config.json's rope_scaling or rope_parameters, metadata of .gguf files."""

from typing import Any

import msgspec

from meshlm.architectures.config_values import boolean, number, shown
from meshlm.architectures.family import GGUFMetadata, MetadataError
from meshlm.protocol.model import RopeSpec

_ROPE_SAME = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
_NEEDLESS = frozenset(("finetuned", "mrope_section", "mrope_interleaved"))
"""mRoPE (Qwen2-VL, Wang et al. 2024) gives positions several axes, and those of text are the same on each."""
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
# By rope_type: the keys that it must have, and those that it may have.
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": ((), ("factor", "original_max_position_embeddings")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (("factor",), ("original_max_position_embeddings", *_YARN)),
    "proportional": ((), ("factor",)),
    "longrope": (("short_factor", "long_factor"), ("original_max_position_embeddings", "attention_factor", "factor")),
}


def stretched(context: int, rope: RopeSpec) -> tuple[int, RopeSpec]:
    """The context that a scaled rotation was made for, as vLLM finds it: people add YaRN to a config.json and leave its context."""
    if rope.rope_type == "linear":
        return int(context * rope.factor), rope
    if rope.rope_type != "yarn":
        return context, rope
    original = rope.original_max_position_embeddings or context
    rope = msgspec.structs.replace(rope, original_max_position_embeddings=original)
    return max(context, int(original * rope.factor)), rope


def rope_spec(config: dict[str, Any]) -> RopeSpec:
    """ValueError names a key of another way to rotate."""
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if not isinstance(old, dict) or not isinstance(new, dict):
        raise ValueError(f"rope_scaling and rope_parameters must be objects, got {shown(old or new)}")
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            raise ValueError(f"rope_scaling and rope_parameters differ in {key}")
    raw = {key: value for key, value in (old | new).items() if value is not None and key not in _NEEDLESS}
    kind = rope_kind(raw)
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ValueError(f"rope_type {shown(kind)} is not supported; supported: {', '.join(ROPE_KEYS)}")
    needed, allowed = ROPE_KEYS[kind]
    if kind == "longrope" and config.get("original_max_position_embeddings") is not None:
        raw["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    mine, plain = {*_ROPE_SAME, *needed, *allowed}, RopeSpec()
    foreign = sorted(key for key in raw if key not in mine and raw[key] != getattr(plain, key, None))
    lost = sorted(set(needed) - raw.keys())
    if foreign or lost:
        raise ValueError(
            f"rope_type {kind} {f'does not know {foreign[0]}' if foreign else f'needs {lost[0]}'} (rope_scaling, rope_parameters)"
        )
    raw.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    raw.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    named = {key: _rope_value(key, raw[key]) for key in raw if key in mine and key not in ("rope_type", "type")}
    spec = RopeSpec(rope_type=kind, **named)
    if kind == "llama3" and spec.high_freq_factor < spec.low_freq_factor:
        raise ValueError("high_freq_factor must not be below low_freq_factor")
    return spec


def rope_kind(raw: dict[str, Any]) -> Any:
    """The rope_type, or `type` as older files name it. ValueError where they differ."""
    kinds = [
        "default" if raw[key] == "mrope" else raw[key] for key in ("rope_type", "type") if raw.get(key) is not None
    ]
    if len(kinds) > 1 and kinds[0] != kinds[1]:
        raise ValueError(f"rope_type {shown(raw['rope_type'])} and type {shown(raw['type'])} differ")
    return kinds[0] if kinds else "default"


def ropes_by_kind(config: dict[str, Any], theta: Any, sliding_theta: Any) -> tuple[RopeSpec, RopeSpec]:
    """The RoPEs of the layers that see all, and of those that slide; newer files give them by kind of layer. theta, sliding_theta:
    where rope_parameters says none. Old keys are those of the layers that see all. ValueError."""
    given = config.get("rope_parameters") or {}
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(given, dict) or not all(isinstance(given.get(kind) or {}, dict) for kind in kinds):
        raise ValueError(f"rope_parameters must be an object with one for each kind of layer, got {shown(given)}")
    foreign = sorted(given.keys() - kinds)
    if foreign:
        raise ValueError(f"rope_parameters holds {foreign[0]}; supported: {', '.join(kinds)}")
    full, sliding = (given.get(kind) or {} for kind in kinds)
    old = {key: config.get(key) for key in ("rope_scaling", "partial_rotary_factor")}
    return (
        rope_spec({**old, "rope_parameters": full, "rope_theta": theta}),
        rope_spec({"rope_parameters": sliding, "rope_theta": sliding_theta}),
    )


def _rope_value(key: str, value: Any) -> Any:
    if key in ("short_factor", "long_factor"):
        if not isinstance(value, list) or not all(number(factor, key) > 0 for factor in value):
            raise ValueError(f"{key} must be a list of positive numbers")
        return tuple(map(float, value))
    if key == "truncate":
        return boolean({key: value}, key)
    low = {"mscale": -1, "mscale_all_dim": -1, "rope_theta": 1, "original_max_position_embeddings": 1}.get(key, 0)
    if number(value, key) <= low:
        raise ValueError(f"{key} is {value}; it must be above {low}")
    return int(value) if key == "original_max_position_embeddings" else float(value)


def gguf_rope(metadata: GGUFMetadata) -> RopeSpec:
    """The rotation that a .gguf file describes. MetadataError."""
    get, factors = metadata.get, metadata.rope_factors
    kind = str(get("rope.scaling.type", "none"))
    theta = float(get("rope.freq_base", 10000.0))
    if factors:
        if kind not in ("none", ""):
            raise MetadataError(f"rope_freqs.weight beside rope.scaling.type {kind} is not supported")
        return RopeSpec(
            rope_type="longrope", rope_theta=theta, short_factor=factors, long_factor=factors, attention_factor=1.0
        )
    if kind in ("none", ""):
        return RopeSpec(rope_theta=theta)
    if kind not in ("linear", "yarn"):
        raise MetadataError(f"rope.scaling.type {kind} is not supported; supported: none, linear, yarn")
    return RopeSpec(
        rope_type=kind,
        rope_theta=theta,
        factor=float(get("rope.scaling.factor", 1.0)),
        original_max_position_embeddings=int(get("rope.scaling.original_context_length", get("context_length"))),
    )
