"""Attention of encoders: each token sees all tokens of its prompt, or a window on both sides; nothing is kept for later steps.

    out = softmax(q k^T * scale + mask) v        (Vaswani et al. 2017, section 3.2.1)

On a GPU in 16 bits all prompts of a step are one call of FlashAttention for sequences of different lengths (Dao 2023). Elsewhere
prompts of about equal length are padded to the longest of them, so that a step takes a few calls whatever its number of prompts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.sparse_latent import ToChoose
from meshlm.workers.batch import CrossCache, StepInputs
from meshlm.workers.layers.ops import AttentionShape, LatentShape, LayerStep
from meshlm.workers.layers.rope import apply_rope
from meshlm.workers.states.torch_states import StepStates

PADDED = 1.2  # times a prompt's length, to which it is padded at most
SHORT = 8  # tokens by which any prompt may be padded


class _Padded(NamedTuple):
    tokens: Tensor  # int64 [n, longest]: their tokens in the step; those that fill up repeat the last one
    mask: Tensor | None  # bool [n, longest]: which are no filling; None: there is none
    rows: Tensor | None  # int64 [their tokens]: places of their tokens in `tokens`, flattened; None: all, in order
    where: Tensor  # int64 [their tokens]: the same tokens in the step


class EncoderAttention:
    """See `meshlm.workers.attention.backend.StepAttention`. Made once per step."""

    def __init__(self, batch: StepInputs) -> None:
        assert batch.lens is not None
        self.lens = [1] * batch.num_decodes + list(batch.lens.query_lens)
        self._device = batch.device
        self._groups: list[_Padded] | None = None
        self._ends: Tensor | None = None

    def attend(
        self, qkv: Tensor, step: LayerStep, heads: AttentionShape, scale: float, sliding_window: int = 0
    ) -> Tensor:
        """See `StepAttention`. sliding_window: tokens that are seen on each side."""
        lines = qkv.view(qkv.shape[0], 3, heads.num_heads, heads.head_dim)
        if step.table.numel():  # while kernels are compiled ahead, nobody has written positions
            places = step.batch.positions.clamp(0, len(step.table) - 1)
            angles = step.table[places].to(qkv.dtype)[:, None]
            half = angles.shape[-1] // 2
            both = apply_rope(lines[:, :2].flatten(1, 2), angles[..., :half], angles[..., half:])
            lines = torch.cat((both.view_as(lines[:, :2]), lines[:, 2:]), dim=1)
        if qkv.is_cuda and qkv.dtype in (torch.float16, torch.bfloat16) and heads.head_dim in range(8, 257, 8):
            return self._flash(lines, scale, sliding_window)
        return self._padded(lines, scale, sliding_window)

    def states(self, group: int) -> StepStates:
        raise AssertionError("an encoder has no recurrent states")

    def attend_cross(self, query: Tensor, cache: CrossCache, scale: float) -> Tensor:
        raise AssertionError("an encoder has no cross-attention")

    def attend_latent(
        self, query: Tensor, latent: Tensor, step: LayerStep, heads: LatentShape, scale: float, chosen: ToChoose = None
    ) -> Tensor:
        raise AssertionError("no encoder has latent attention")

    def _flash(self, lines: Tensor, scale: float, window: int) -> Tensor:
        if self._ends is None:
            ends = torch.tensor([0, *self.lens]).cumsum(0).int()
            self._ends = ends.pin_memory().to(self._device, non_blocking=True)
        longest, side = max(self.lens), window or -1
        query, key, value = lines.unbind(1)
        found = torch.ops.aten._flash_attention_forward(
            query, key, value, self._ends, self._ends, longest, longest, 0.0, False, False,
            scale=scale, window_size_left=side, window_size_right=side,
        )  # fmt: skip
        out: Tensor = found[0]
        return out

    def _padded(self, lines: Tensor, scale: float, window: int) -> Tensor:
        if self._groups is None:
            self._groups = _groups(self.lens, self._device)
        out = torch.empty_like(lines[:, 0], memory_format=torch.contiguous_format)
        for tokens, mask, rows, where in self._groups:
            query, key, value = lines[tokens].permute(2, 0, 3, 1, 4)  # each [n, heads, longest, d]
            seen = None if mask is None else mask[:, None, None]
            if window and tokens.shape[1] > window + 1:
                at = torch.arange(tokens.shape[1], device=self._device)
                near = (at - at[:, None]).abs() <= window
                seen = near if seen is None else seen & near
            found = F.scaled_dot_product_attention(query, key, value, seen, scale=scale).transpose(1, 2).flatten(0, 1)
            out[where] = found if rows is None else found[rows]
        return out


def _groups(lens: list[int], device: torch.device) -> list[_Padded]:
    """Prompts by length, those of about equal length together."""
    begins = [0]
    for count in lens:
        begins.append(begins[-1] + count)
    groups: list[list[int]] = []
    for prompt in sorted(range(len(lens)), key=lens.__getitem__, reverse=True):
        longest = lens[groups[-1][0]] if groups else 0
        if not groups or longest > max(lens[prompt] * PADDED, lens[prompt] + SHORT):
            groups.append([])
        groups[-1].append(prompt)
    found = []
    for group in groups:
        longest = lens[group[0]]
        first = torch.tensor([begins[prompt] for prompt in group], device=device)[:, None]
        counts = torch.tensor([lens[prompt] for prompt in group], device=device)[:, None]
        at = torch.arange(longest, device=device)
        tokens = first + at.minimum(counts - 1)
        if lens[group[-1]] == longest:
            found.append(_Padded(tokens, None, None, tokens.flatten()))
            continue
        mask = at < counts
        found.append(_Padded(tokens, mask, mask.flatten().nonzero()[:, 0], tokens[mask]))
    return found


class EncoderBackend:
    name, graphs, fp8 = "encoder", False, False

    def unsupported(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, block_size: int) -> str:
        return "" if spec.encoder_only else "it has no KV cache"

    def step(self, batch: StepInputs, block_size: int) -> EncoderAttention:
        return EncoderAttention(batch)
