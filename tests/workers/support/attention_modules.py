"""FlashAttention 3 and FlashInfer as far as they are called: the same names and signatures, computed in plain torch."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns, Extras
from meshlm.kernels.attention.reference import attention


def computed(
    query: Tensor, keys: Tensor, values: Tensor, pages: list[list[int]], lengths: list[int], ends: list[int],
    scale: float, extras: Extras,
) -> Tensor:  # fmt: skip
    """What both compute; ends: of each prompt's tokens."""
    width = max(map(len, pages))
    blocks = torch.tensor([row + row[-1:] * (width - len(row)) for row in pages], dtype=torch.int32)
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    starts = torch.tensor([length - count for length, count in zip(lengths, counts, strict=True)])
    rows = torch.arange(len(ends))
    at = Columns(rows, starts, torch.tensor(ends), len(ends), blocks)
    return attention(query, keys, values, at, scale, extras).to(query.dtype)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, qv: None = None,
    rotary_cos: None = None, rotary_sin: None = None, cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None, cache_leftpad: None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: None = None, max_seqlen_q: int | None = None,
    rotary_seqlens: None = None, q_descale: None = None, k_descale: None = None, v_descale: None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: None = None, num_splits: int = 0, pack_gqa: None = None, sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:  # fmt: skip
    """FlashAttention 3's. A window is the number of keys to the left of the query's own."""
    assert cache_seqlens is not None
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert {cache_seqlens.dtype, page_table.dtype, cu_seqlens_q.dtype} == {torch.int32}
    assert causal
    assert window_size[1] == (-1 if window_size[0] == -1 else 0)
    ends, lengths = cu_seqlens_q.tolist()[1:], cache_seqlens.tolist()
    assert max_seqlen_q == max(end - begin for begin, end in zip(cu_seqlens_q.tolist(), ends, strict=False))
    extras = Extras(window=window_size[0] + 1, cap=softcap)
    assert softmax_scale is not None
    return computed(q, k_cache, v_cache, page_table.tolist(), lengths, ends, softmax_scale, extras)


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer's. What is planned counts for all runs until the next plan."""

    num_plans = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None,
        custom_mask: None = None, packed_custom_mask: None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: None = None, rope_theta: None = None,
        q_data_type: Any = "float16", kv_data_type: Any = None, non_blocking: bool = True,
    ) -> None:  # fmt: skip
        assert causal
        assert sm_scale is not None
        assert paged_kv_indices.dtype == torch.int32
        type(self).num_plans += 1
        self._heads, self._types = (num_qo_heads, num_kv_heads, head_dim_qk, page_size), (q_data_type, kv_data_type)
        borders, indices = paged_kv_indptr.tolist(), paged_kv_indices.tolist()
        self._pages = [indices[begin:end] for begin, end in pairwise(borders)]
        last = paged_kv_last_page_len.tolist()
        assert all(1 <= length <= page_size for length in last)
        self._lengths = [(len(row) - 1) * page_size + length for row, length in zip(self._pages, last, strict=True)]
        self._ends, self._scale = qo_indptr.tolist()[1:], sm_scale
        self._extras = Extras(window=window_left + 1, cap=logits_soft_cap or 0.0)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert (q.shape[1], keys.shape[2], q.shape[2], keys.shape[1]) == self._heads
        assert (q.dtype, keys.dtype) == self._types
        return computed(q, keys, values, self._pages, self._lengths, self._ends, self._scale, self._extras)


MODULES = {
    "flash_attn": SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache),
    "flashinfer": SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper),
}
