"""A model's config.json as a ModelSpec, or one line that says which key of it cannot be honoured. Imports no torch.

What a key defaults to where it is missing is what transformers' class of that family says. Called by model_files.py.
"""

import math
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from meshlm.protocol.model import ModelSpec, RopeSpec
from meshlm.runtime import config_keys
from meshlm.runtime.config_keys import shown
from meshlm.runtime.errors import ModelFilesError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""The architectures that are served, and the model_type that their config.json has."""
_QWEN = {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": {**_QWEN, "head_dim": 128},
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}
ACTIVATIONS |= {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}  # the same formula
MAX_SIZE, MAX_LAYERS, MAX_HEAD_DIM, MAX_CONTEXT = 1 << 24, 1 << 13, 1024, 1 << 30
_ROPE_SAME = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
# By rope_type: the keys that it must have, and those that it may have.
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": ((), ("factor", "original_max_position_embeddings")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (("factor",), ("original_max_position_embeddings", *_YARN)),
    "longrope": (("short_factor", "long_factor"), ("original_max_position_embeddings", "attention_factor", "factor")),
}


def parse_config(config: dict[str, Any], path: Path) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model's shape, and notes for the user. ModelFilesError names the key that is missing, wrong or not honoured."""
    where = f"{path}/config.json"
    architecture = _architecture(config, path)
    try:
        unknown = config_keys.check(config, architecture)
        spec = _spec(_DEFAULTS[architecture] | config, architecture)
    except KeyError as error:
        raise ModelFilesError(f"{where}: key {error} is missing") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelFilesError(f"{where}: {error}") from None
    check(spec, path)
    notes = [f"{where}: unknown keys are ignored: {', '.join(sorted(unknown))}"] if unknown else []
    if config.get("auto_map"):
        notes.append(
            f"{where}: auto_map names code that comes with the model; it is not run, {architecture} is served by our own"
        )
    return spec, tuple(notes)


def _architecture(config: dict[str, Any], path: Path) -> str:
    given = config.get("architectures") or []
    names = list(dict.fromkeys(map(str, given if isinstance(given, list) else [given])))
    if len(names) > 1:
        raise ModelFilesError(f"{path}: config.json names several architectures ({', '.join(names)}); it must name one")
    if not names or names[0] not in FAMILIES:
        name = names[0] if names else "none"
        raise ModelFilesError(f"{path}: architecture {name} is not supported; supported: {', '.join(FAMILIES)}")
    kind = config.get("model_type")
    if kind is not None and kind != FAMILIES[names[0]]:
        raise ModelFilesError(
            f"{path}: config.json has model_type {shown(kind)} beside architecture {names[0]}; that is not supported"
        )
    return names[0]


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    heads, hidden, layers = (
        _integer(config, key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    if heads < 1 or (config.get("head_dim") is None and hidden % heads):
        raise ValueError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and there is no head_dim"
        )
    context, rope = _stretched(_integer(config, "max_position_embeddings"), _rope(config))
    window, sliding = _sliding(config, architecture, layers, context)
    act = config.get("hidden_act", "silu")
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise ValueError(f"hidden_act {shown(act)} is not supported; supported: {', '.join(ACTIVATIONS)}")
    bias = _boolean(config, "attention_bias")
    return ModelSpec(
        architecture=architecture,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_integer(config, "num_key_value_heads", heads),
        head_dim=_integer(config, "head_dim", hidden // heads),
        max_position_embeddings=context,
        rms_norm_eps=_number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        hidden_act=ACTIVATIONS[act],
        rope=rope,
        tie_word_embeddings=_boolean(config, "tie_word_embeddings"),
        attention_bias=architecture == "Qwen2ForCausalLM" or bias,
        output_bias=architecture != "Qwen2ForCausalLM" and bias,
        mlp_bias=_boolean(config, "mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=window,
        sliding_layers=sliding,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _integer(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """KeyError where it is missing and has no default; null is as good as missing."""
    value = config.get(key, default) if default is not None else config[key]
    value = default if value is None else value
    if type(value) is not int:
        raise ValueError(f"{key} must be an integer, got {shown(value)}")
    return value


def _boolean(config: dict[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise ValueError(f"{key} must be true or false, got {shown(value)}")
    return bool(value)


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number that is not negative, got {shown(value)}")
    return float(value)


def _sliding(config: dict[str, Any], architecture: str, layers: int, context: int) -> tuple[int, tuple[bool, ...]]:
    """Window, and which layers use it."""
    window = _integer(config, "sliding_window", 0)
    qwen = architecture.startswith("Qwen")
    if window < 0:
        raise ValueError(f"sliding_window is {window}; it must be positive, or null")
    if qwen and not _boolean(config, "use_sliding_window"):
        window = 0
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise ValueError(f"layer_types must name the kind of each of {layers} layers, got {shown(kinds)}")
    foreign = next((kind for kind in kinds or () if kind not in ("full_attention", "sliding_attention")), None)
    if foreign is not None:
        raise ValueError(f"layer_types holds {shown(foreign)}; supported: full_attention, sliding_attention")
    if qwen:
        sliding = [kind == "sliding_attention" for kind in kinds or ()]
        if kinds is None:
            first = _integer(config, "max_window_layers", layers)
            sliding = [layer >= first for layer in range(layers)]
        return (window, tuple(sliding)) if window and any(sliding) else (0, ())
    if window >= context:
        return 0, ()
    wanted = "sliding_attention" if window and architecture == "MistralForCausalLM" else "full_attention"
    if any(kind != wanted for kind in kinds or ()) or (window and architecture == "LlamaForCausalLM"):
        raise ValueError(f"sliding_window {window} with these layer_types is not supported for {architecture}")
    return window, ()


def _stretched(context: int, rope: RopeSpec) -> tuple[int, RopeSpec]:
    """The context that a scaled rotation was made for, as vLLM finds it: people add YaRN to a config.json and leave its context."""
    if rope.rope_type == "linear":
        return int(context * rope.factor), rope
    if rope.rope_type != "yarn":
        return context, rope
    original = rope.original_max_position_embeddings or context
    rope = msgspec.structs.replace(rope, original_max_position_embeddings=original)
    return max(context, int(original * rope.factor)), rope


def _rope(config: dict[str, Any]) -> RopeSpec:
    """ValueError names a key of another way to rotate."""
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if not isinstance(old, dict) or not isinstance(new, dict):
        raise ValueError(f"rope_scaling and rope_parameters must be objects, got {shown(old or new)}")
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            raise ValueError(f"rope_scaling and rope_parameters differ in {key}")
    raw = {key: value for key, value in (old | new).items() if value is not None and key != "finetuned"}
    kind = raw.get("rope_type", raw.get("type", "default"))
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
    if kind == "llama3" and spec.high_freq_factor <= spec.low_freq_factor:
        raise ValueError("high_freq_factor must be above low_freq_factor")
    return spec


def _rope_value(key: str, value: Any) -> Any:
    if key in ("short_factor", "long_factor"):
        if not isinstance(value, list) or not all(_number(factor, key) > 0 for factor in value):
            raise ValueError(f"{key} must be a list of positive numbers")
        return tuple(map(float, value))
    if key == "truncate":
        return _boolean({key: value}, key)
    low = {"mscale": -1, "mscale_all_dim": -1, "rope_theta": 1, "original_max_position_embeddings": 1}.get(key, 0)
    if _number(value, key) <= low:
        raise ValueError(f"{key} is {value}; it must be above {low}")
    return int(value) if key == "original_max_position_embeddings" else float(value)


_POSITIVE = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def check(spec: ModelSpec, path: Path) -> None:
    """What kernels rely on, and would not survive. ModelFilesError."""
    limits = dict.fromkeys(_POSITIVE, MAX_SIZE) | {
        "num_hidden_layers": MAX_LAYERS,
        "max_position_embeddings": MAX_CONTEXT,
    }
    for name, limit in limits.items():
        value = getattr(spec, name)
        if value < 1:
            raise ModelFilesError(f"{path}: {name} is {value}; it must be positive")
        if value > limit:
            raise ModelFilesError(f"{path}: {name} is {value}; it may be {limit} at most")
    for name in ("rms_norm_eps", "rope.rope_theta", "rope.factor"):  # a .gguf file's may be anything
        value = attrgetter(name)(spec)
        if not math.isfinite(value):
            raise ModelFilesError(f"{path}: {name} is {value}; it must be a finite number")
    heads, kv_heads, dim = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    if heads % kv_heads:
        raise ModelFilesError(f"{path}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    rotary = int(dim * spec.rope.partial_rotary_factor)
    for factors in (spec.rope.short_factor, spec.rope.long_factor):
        if len(factors) not in (0, rotary // 2):
            raise ModelFilesError(f"{path}: {len(factors)} factors of rotation; there are {rotary // 2} frequencies")
    if dim > MAX_HEAD_DIM or rotary % 2 or not 0 < rotary <= dim:
        raise ModelFilesError(
            f"{path}: head_dim {dim} of which {rotary} are rotated; an even number of at most head_dim can be, and that is "
            f"{MAX_HEAD_DIM} at most"
        )
