"""The common base of models with Mamba layers (Gu and Dao 2023) or Mamba-2 layers: sizes as files give them, and a mixer's weights."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from meshlm.architectures.config_values import boolean, integer, layer_kinds, number, positive, shown, words
from meshlm.architectures.family import GGUFMetadata, MetadataError, Split, Weight
from meshlm.architectures.weights import columns, rows
from meshlm.protocol.layers import StateSpec
from meshlm.protocol.model import ModelSpec

KEYS = words("""
    mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv mamba_expand mamba_chunk_size
    mamba_conv_bias mamba_proj_bias time_step_limit
""")
PACKED: Mapping[str, tuple[str, ...]] = {
    "mamba.in_proj": tuple(f"mamba.{part}_proj" for part in ("z", "x", "b", "c", "dt")),
    "mamba.conv1d": tuple(f"mamba.{part}_conv" for part in "xbc"),
}
GGUF_PACKED: Mapping[str, tuple[str, ...]] = {
    "ssm_in": tuple(f"ssm_in.{part}" for part in ("z", "x", "b", "c", "dt")),
    "ssm_conv1d": tuple(f"ssm_conv1d.{part}" for part in "xbc"),
}
GGUF_STATE = words("ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank ssm.group_count")
MODEL = "meshlm.workers.models.hybrid:Hybrid"
# the last is transformers 5's JSON
_INFINITE: tuple[Any, ...] = "inf", "Infinity", float("inf"), {"__float__": "Infinity"}


def check_activation(config: dict[str, Any]) -> None:
    """Mixers with a state have SiLU behind their convolution and their gate, whatever MLPs have. ValueError."""
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ValueError(f"hidden_act {shown(act)} is not supported beside layers with a state; supported: silu")


def mamba2_state(config: dict[str, Any], names: Mapping[str, str] | None = None, *, expands: bool = True) -> StateSpec:
    """The state of a layer. names: the family's keys, where they are not Bamba's. expands: heads are as wide as the expanded
    hidden size. KeyError, ValueError."""

    def key(name: str) -> str:
        return (names or {}).get(name, name)

    def size(name: str, default: int | None = None) -> int:
        return positive(config, key(name), default)

    heads, groups, hidden = size("mamba_n_heads"), size("mamba_n_groups"), integer(config, "hidden_size")
    each = config.get(key("mamba_d_head"), "auto")
    each = size("mamba_expand") * hidden // heads if each in (None, "auto") else size("mamba_d_head")
    if heads % groups:
        raise ValueError(f"{key('mamba_n_heads')} {heads} is no multiple of {key('mamba_n_groups')} {groups}")
    if expands and heads * each != size("mamba_expand") * hidden:
        raise ValueError(
            f"{key('mamba_n_heads')} {heads} heads of {each} are not {key('mamba_expand')} times hidden_size {hidden}"
        )
    check_activation(config)
    return StateSpec(
        kind="mamba2", num_heads=heads, head_dim=each, state_size=size("mamba_d_state"), n_groups=groups,
        conv_kernel=size("mamba_d_conv", 4), conv_bias=config.get(key("mamba_conv_bias")) is not False,
        proj_bias=boolean(config, key("mamba_proj_bias")), chunk_size=size("mamba_chunk_size", 256),
        time_step_limit=time_step_limit(config), dtype=dtype_of_states(config),
    )  # fmt: skip


def mamba2_gguf(metadata: GGUFMetadata) -> StateSpec:
    """The state of a layer of a .gguf file. MetadataError."""
    names = ("time_step_rank", "inner_size", "state_size", "group_count", "conv_kernel")
    heads, inner, numbers, groups, kernel = sizes = [int(metadata.get(f"ssm.{name}")) for name in names]
    if min(sizes) < 1 or inner % heads or heads % groups:
        raise MetadataError(
            f"metadata {metadata.kind}.ssm: {inner} numbers of {heads} heads in {groups} groups are not supported"
        )
    return StateSpec(
        kind="mamba2", num_heads=heads, head_dim=inner // heads, state_size=numbers, n_groups=groups,
        conv_kernel=kernel, conv_bias=metadata.has("ssm_conv1d.bias"), proj_bias=metadata.has("ssm_in.bias"),
        gated_norm=metadata.has("ssm_norm.weight"),
    )  # fmt: skip


def dtype_of_states(config: dict[str, Any]) -> str:
    """That the file wants for states. ValueError."""
    found = config.get("mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype") or "auto"
    if found not in ("auto", "float32", "float16", "bfloat16"):
        raise ValueError(
            f"mamba_ssm_cache_dtype {shown(found)} is not supported; supported: float32, float16, bfloat16"
        )
    return str(found)


def layers_of(config: dict[str, Any], kinds: Mapping[str, str]) -> tuple[str, ...]:
    """The kind of each layer, from layer_types or layers_block_type. kinds: their names in files, and ours. ValueError."""
    given = config.get("layers_block_type") or config.get("layer_types")
    if given is None:
        raise KeyError("layer_types")
    return tuple(kinds[kind] for kind in layer_kinds(given, integer(config, "num_hidden_layers"), kinds))


def time_step_limit(config: dict[str, Any]) -> tuple[float, float | None]:
    """The limits of a step; None: no upper one. ValueError."""
    found = config.get("time_step_limit")
    if found is None:
        return 0.0, None
    if not isinstance(found, list | tuple) or len(found) != 2:
        raise ValueError(f"time_step_limit must be two numbers, got {shown(found)}")
    low, high = (None if one in _INFINITE else number(one, "time_step_limit") for one in found)
    if low is None:
        raise ValueError(f"time_step_limit begins with {shown(found[0])}; it must be a number")
    return low, high


def mamba2_weights(spec: ModelSpec) -> Iterator[Weight]:
    """A layer's mixer. Files hold the rows of in_proj and conv1d in one tensor each (PACKED)."""
    state = spec.state
    assert state is not None
    inner, numbers, heads, hidden = state.inner, state.n_groups * state.state_size, state.num_heads, spec.hidden_size
    wide, groups = Split.INTERMEDIATE, Split.STATE_GROUPS
    inputs = (
        ("z", inner, wide),
        ("x", inner, wide),
        ("b", numbers, groups),
        ("c", numbers, groups),
        ("dt", heads, wide),
    )
    for name, size, split in inputs:
        stem, gguf = f"mamba.{name}_proj", f"ssm_in.{name}"
        yield from columns(stem, gguf, "attention.qkv", (size, hidden), split, bias=state.proj_bias)
    for name, size, split in inputs[1:4]:
        taps, stem, gguf = (size, 1, state.conv_kernel), f"mamba.{name}_conv", f"ssm_conv1d.{name}"
        yield from columns(stem, gguf, "attention.conv", taps, split, bias=state.conv_bias)
    for name, gguf, parameter in (
        ("dt_bias", "ssm_dt.bias", "dt_bias"),
        ("A_log", "ssm_a", "a_log"),
        ("D", "ssm_d", "d"),
    ):
        yield Weight(f"mamba.{name}", gguf, f"attention.{parameter}", (heads,), wide)
    if state.gated_norm:
        yield Weight("mamba.norm.weight", "ssm_norm.weight", "attention.gated_norm.weight", (inner,), wide)
    yield from rows("mamba.out_proj", "ssm_out", "attention.o", (hidden, inner), wide, bias=state.proj_bias)


GGUF_MAMBA_STATE = words("ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank")
_SIZES = ("mamba_expand", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank")


def mamba_state(
    config: dict[str, Any], mixer_norm: Literal["none", "plain", "weighted"], names: Mapping[str, str] | None = None
) -> StateSpec:
    """The state of a layer. names: the family's keys, where they are not Jamba's. KeyError, ValueError."""

    def key(name: str) -> str:
        return (names or {}).get(name, name)

    check_activation(config)
    hidden = integer(config, "hidden_size")
    if config.get(key("mamba_dt_rank"), "auto") in (None, "auto"):
        config = {**config, key("mamba_dt_rank"): -(-hidden // 16)}
    sizes = {name: positive(config, key(name)) for name in _SIZES}
    return StateSpec(
        kind="mamba", num_heads=sizes["mamba_expand"] * hidden, head_dim=1, state_size=sizes["mamba_d_state"],
        conv_kernel=sizes["mamba_d_conv"], conv_bias=config.get(key("mamba_conv_bias")) is not False,
        proj_bias=boolean(config, key("mamba_proj_bias")), time_step_rank=sizes["mamba_dt_rank"], mixer_norm=mixer_norm,
        mixer_norm_eps=number(config.get("mixer_rms_eps", 1e-6), "mixer_rms_eps"),
    )  # fmt: skip


def mamba_gguf(metadata: GGUFMetadata, mixer_norm: Literal["none", "plain", "weighted"]) -> StateSpec:
    """The state of a layer of a .gguf file. MetadataError."""
    names = ("inner_size", "state_size", "conv_kernel", "time_step_rank")
    inner, numbers, kernel, rank = sizes = [int(metadata.get(f"ssm.{name}")) for name in names]
    if min(sizes) < 1:
        raise MetadataError(f"metadata {metadata.kind}.ssm: sizes must be positive")
    return StateSpec(
        kind="mamba", num_heads=inner, head_dim=1, state_size=numbers, conv_kernel=kernel,
        conv_bias=metadata.has("ssm_conv1d.bias"), proj_bias=metadata.has("ssm_in.bias"), time_step_rank=rank,
        mixer_norm=mixer_norm,
    )  # fmt: skip


def mamba_weights(spec: ModelSpec) -> Iterator[Weight]:
    state = spec.state
    assert state is not None
    inner, hidden, rank, numbers = state.inner, spec.hidden_size, state.time_step_rank, state.state_size
    wide = Split.INTERMEDIATE
    whole, conv = Split.REPLICATED, (inner, 1, state.conv_kernel)
    yield from columns("mamba.in_proj", "ssm_in", "attention.qkv", (2 * inner, hidden), whole, bias=state.proj_bias)
    yield from columns("mamba.conv1d", "ssm_conv1d", "attention.conv", conv, wide, bias=state.conv_bias)
    x_proj = (rank + 2 * numbers, inner)
    yield Weight("mamba.x_proj.weight", "ssm_x.weight", "attention.x_proj.weight", x_proj, wide, dim=1)
    yield from columns("mamba.dt_proj", "ssm_dt", "attention.dt_proj", (inner, rank), wide, bias=True)
    if state.mixer_norm == "weighted":
        for name, size in (("dt", rank), ("b", numbers), ("c", numbers)):
            stem = f"mamba.{name}_layernorm.weight"
            yield Weight(stem, f"ssm_{name}_norm.weight", f"attention.{name}_norm.weight", (size,))
    yield Weight("mamba.A_log", "ssm_a", "attention.a_log", (inner, numbers), wide)
    yield Weight("mamba.D", "ssm_d", "attention.d", (inner,), wide)
    yield from rows("mamba.out_proj", "ssm_out", "attention.o", (hidden, inner), wide, bias=state.proj_bias)
