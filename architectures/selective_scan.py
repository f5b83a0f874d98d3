"""What models with Mamba's own layers have in common (Gu and Dao 2023): the sizes that their files give, and the weights of a mixer."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from meshlm.architectures.config_values import boolean, integer, number, positive, words
from meshlm.architectures.family import GGUFMetadata, MetadataError, Split, Weight
from meshlm.architectures.states import check_activation
from meshlm.protocol.layers import StateSpec
from meshlm.protocol.model import ModelSpec

GGUF_STATE = words("ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank")
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
        kind="mamba",
        num_heads=sizes["mamba_expand"] * hidden,
        head_dim=1,
        state_size=sizes["mamba_d_state"],
        conv_kernel=sizes["mamba_d_conv"],
        conv_bias=config.get(key("mamba_conv_bias")) is not False,
        proj_bias=boolean(config, key("mamba_proj_bias")),
        time_step_rank=sizes["mamba_dt_rank"],
        mixer_norm=mixer_norm,
        mixer_norm_eps=number(config.get("mixer_rms_eps", 1e-6), "mixer_rms_eps"),
    )


def mamba_gguf(metadata: GGUFMetadata, mixer_norm: Literal["none", "plain", "weighted"]) -> StateSpec:
    """The state of a layer of a .gguf file. MetadataError."""
    names = ("inner_size", "state_size", "conv_kernel", "time_step_rank")
    inner, numbers, kernel, rank = sizes = [int(metadata.get(f"ssm.{name}")) for name in names]
    if min(sizes) < 1:
        raise MetadataError(f"metadata {metadata.kind}.ssm: sizes must be positive")
    return StateSpec(
        kind="mamba",
        num_heads=inner,
        head_dim=1,
        state_size=numbers,
        conv_kernel=kernel,
        conv_bias=metadata.has("ssm_conv1d.bias"),
        proj_bias=metadata.has("ssm_in.bias"),
        time_step_rank=rank,
        mixer_norm=mixer_norm,
    )


def mamba_weights(spec: ModelSpec) -> Iterator[Weight]:
    """A layer's mixer."""
    state = spec.state
    assert state is not None
    inner, hidden, rank, numbers = state.inner, spec.hidden_size, state.time_step_rank, state.state_size
    wide = Split.INTERMEDIATE
    yield Weight("mamba.in_proj.weight", "ssm_in.weight", "attention.qkv.weight", (2 * inner, hidden))
    conv = (inner, 1, state.conv_kernel)
    yield Weight("mamba.conv1d.weight", "ssm_conv1d.weight", "attention.conv.weight", conv, wide)
    if state.conv_bias:
        yield Weight("mamba.conv1d.bias", "ssm_conv1d.bias", "attention.conv.bias", (inner,), wide)
    x_proj = (rank + 2 * numbers, inner)
    yield Weight("mamba.x_proj.weight", "ssm_x.weight", "attention.x_proj.weight", x_proj, wide, dim=1)
    yield Weight("mamba.dt_proj.weight", "ssm_dt.weight", "attention.dt_proj.weight", (inner, rank), wide)
    yield Weight("mamba.dt_proj.bias", "ssm_dt.bias", "attention.dt_proj.bias", (inner,), wide)
    if state.mixer_norm == "weighted":
        for name, size in (("dt", rank), ("b", numbers), ("c", numbers)):
            stem = f"mamba.{name}_layernorm.weight"
            yield Weight(stem, f"ssm_{name}_norm.weight", f"attention.{name}_norm.weight", (size,))
    yield Weight("mamba.A_log", "ssm_a", "attention.a_log", (inner, numbers), wide)
    yield Weight("mamba.D", "ssm_d", "attention.d", (inner,), wide)
    yield Weight("mamba.out_proj.weight", "ssm_out.weight", "attention.o.weight", (hidden, inner), wide, dim=1)
    if state.proj_bias:
        yield Weight("mamba.in_proj.bias", "ssm_in.bias", "attention.qkv.bias", (2 * inner,))
        yield Weight("mamba.out_proj.bias", "ssm_out.bias", "attention.o.bias", (hidden,), Split.FIRST_RANK)
