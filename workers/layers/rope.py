"""Rotary position embedding and its scalings, as a table of cosines and sines.

RoFormer (Su et al. 2021); linear: position interpolation (Chen et al. 2023); llama3: Llama 3.1's frequency bands;
yarn: Peng et al. 2023, section 3; longrope: Ding et al. 2024; proportional: Gemma 4's, of which the first numbers of a head's halves
turn and the others by zero. Rotates halves (the Hugging Face layout).
"""

import math

import torch
from torch import Tensor

from meshlm.protocol.model import ModelSpec, RopeSpec


def rope_table(spec: ModelSpec, max_len: int, rope: RopeSpec | None = None) -> Tensor:
    """float32 [max_len, rotary_dim]: cosines in the first half, sines in the second. rope: that of layers with a window, where
    they have one of their own."""
    dim = spec.rotary_dim if rope is None else rope.rotary_dim(spec.sliding_head_dim)
    rope = rope or spec.rope
    frequencies, factor = _frequencies(rope, dim, spec.max_position_embeddings, max_len)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1) * factor


def axes_of(spec: ModelSpec, table: Tensor) -> Tensor:
    """int64 [1, 1, rotary_dim]: by number of a table's line, the axis that it turns by; empty for a model without M-RoPE."""
    if spec.media is None or not spec.media.mrope_section:
        return torch.empty(0)
    axes = spec.media.axes(table.shape[1] // 2)
    return torch.tensor([[[*axes, *axes]]], device=table.device)


def turned_table(table: Tensor, positions: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """M-RoPE (Wang et al. 2024): of a step with int64 [3, t] positions a table with a line for each token, and the lines' numbers.

    axes: see `axes_of`."""
    rows = table[positions.clamp(0, len(table) - 1)]  # compiled ahead, when nobody has written positions
    found = rows.gather(0, axes.expand(1, rows.shape[1], -1))[0]
    return found, torch.arange(len(found), device=table.device)


def _frequencies(rope: RopeSpec, dim: int, max_position: int, max_len: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] and the factor on cos and sin."""
    base = 1.0 / rope.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    original = rope.original_max_position_embeddings or max_position
    match rope.rope_type:
        case "default" | "dynamic":  # dynamic changes nothing up to the model's own context
            return base, 1.0
        case "linear":
            return base / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, base, original), 1.0
        case "yarn":
            return _yarn(rope, base, dim, original)
        case "proportional":  # the angles of the first numbers are as if all were rotated
            still = torch.arange(len(base)) >= int(rope.partial_rotary_factor * dim // 2)
            return base.masked_fill(still, 0.0) / rope.factor, 1.0
        case "longrope":
            return _longrope(rope, base, max_position, original, max_len)
    raise ValueError(
        f"rope_type {rope.rope_type!r} is not supported; supported: default, linear, dynamic, llama3, yarn, longrope, proportional"
    )


def _llama3(rope: RopeSpec, base: Tensor, original: int) -> Tensor:
    low, high = original / rope.low_freq_factor, original / rope.high_freq_factor
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * base / rope.factor + smooth * base
    scaled = torch.where(wavelength > low, base / rope.factor, base)
    between = (wavelength <= low) & (wavelength >= high)
    return torch.where(between, blended, scaled)


def yarn_mscale(factor: float, weight: float) -> float:
    """How much YaRN lengthens queries and keys of a context that is `factor` times as long (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(rope: RopeSpec, base: Tensor, dim: int, original: int) -> tuple[Tensor, float]:
    def mscale(weight: float = 1.0) -> float:
        return yarn_mscale(rope.factor, weight)

    if rope.attention_factor is not None:
        factor = rope.attention_factor
    elif rope.mscale and rope.mscale_all_dim:
        factor = mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    else:
        factor = mscale()

    def dim_of(rotations: float) -> float:
        """The dimension that turns so often over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp), factor


def _longrope(rope: RopeSpec, base: Tensor, max_position: int, original: int, max_len: int) -> tuple[Tensor, float]:
    """One set of factors for all lengths: the long ones as soon as the server's context needs them."""
    factors = torch.tensor(rope.long_factor if max_len > original else rope.short_factor)
    stretch = max_position / original
    factor = rope.attention_factor
    if factor is None:
        factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return base / factors, factor


def apply_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [t, h, d] by cos, sin [t, 1, rotary_dim / 2]; dimensions past rotary_dim stay."""
    half = cos.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, rest) if rest.shape[-1] else rotated, dim=-1)


def apply_rope_to_neighbours(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same for heads [t, h, rotary_dim] of which numbers 2i and 2i + 1 are turned together."""
    first, second = heads[..., ::2], heads[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
