"""Attention of prompts by packages that a user has installed: FlashAttention 3 and FlashInfer, by vLLM's names. Neither is required.

Prompts wait for arithmetic, which is where these packages are good. Decodes stay with the Triton kernel, which also writes the cache,
and so do the steps of CUDA graphs, whose prompts the host does not know. A package must give what plain torch gives on this very GPU
before it is used: `unsupported` tests it.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Extras
from meshlm.kernels.attention.reference import attention
from meshlm.kernels.attention.requests import PagedStep, Request
from meshlm.kernels.self_test import Result, distance, why_wrong
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.attention_packages import PACKAGES
from meshlm.workers.attention.triton_backend import TritonAttention, TritonBackend
from meshlm.workers.batch import KnownRequests, LayerCache, Prompt

WORKSPACE_BYTES = 256 << 20  # FlashInfer's, for the parts of split contexts
NEAR = 0.02  # of the norm of what plain torch gives
MEASURE = "of the norm away from plain torch on this GPU"
TESTED: tuple[Request, ...] = ((20, 33), (0, 1), (37, 2), (0, 90))  # the prompts of the self-test


class Prompts(NamedTuple):
    """The prompts of a step, on the device and on the host."""

    begin: int  # the step's tokens that they have
    end: int
    counts: tuple[int, ...]  # tokens of this step
    lengths: tuple[int, ...]  # these and those before them that they may see
    pages: Tensor  # int32 [prompts, most pages]; what lies behind a prompt's last page is any page

    @classmethod
    def of(cls, known: KnownRequests, blocks: Tensor, page: int, window: int) -> "Prompts":
        """blocks int32 [rows, pages]: the block tables of all rows. Pages before every token's window may have a new owner and hold
        anything, NaN too, and a package may read a whole tile of keys of which few are seen: prompts begin behind them. What a
        token sees is counted from its own place, so nothing else changes."""
        prompts = known.prompts
        oldest = [max(0, prompt.start - window + 1) // page if window else 0 for prompt in prompts]
        counts = tuple(prompt.num_tokens for prompt in prompts)
        lengths = tuple(
            prompt.start + prompt.num_tokens - first * page for prompt, first in zip(prompts, oldest, strict=True)
        )
        rows, firsts = (_on(blocks.device, of, torch.int64) for of in ([prompt.row for prompt in prompts], oldest))
        at = firsts[:, None] + torch.arange(-(-max(lengths) // page), device=blocks.device)
        begin, pages = prompts[0].first, blocks[rows[:, None], at.clamp(max=blocks.shape[1] - 1)]
        return cls(begin, begin + sum(counts), counts, lengths, pages)


class Package(Protocol):
    """An installed package, for one device."""

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, prompts: Prompts, scale: float, extras: Extras, step: object
    ) -> Tensor:
        """query [tokens, heads, d] of the prompts; keys, values [blocks, page, kv_heads, d], which hold this step's, too. step: the
        same object for all layers of a step that have the same prompts."""


class FlashAttention3:
    """`flash_attn_interface`, as it is built from the folder hopper of github.com/Dao-AILab/flash-attention."""

    def __init__(self, module: Any) -> None:
        self._function = module.flash_attn_with_kvcache

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, prompts: Prompts, scale: float, extras: Extras, step: object
    ) -> Tensor:
        """See `Package`. It counts the keys of a window without the query's own."""
        window = (extras.window - 1, 0) if extras.window else (-1, -1)
        found: Tensor = self._function(
            query, keys, values, cache_seqlens=_on(query.device, prompts.lengths, torch.int32),
            page_table=prompts.pages, cu_seqlens_q=_on(query.device, (0, *_sums(prompts.counts)), torch.int32),
            max_seqlen_q=max(prompts.counts), softmax_scale=scale, causal=True, window_size=window, softcap=extras.cap,
        )  # fmt: skip
        return found


class FlashInfer:
    """`flashinfer` (flashinfer-python). What it plans for a step's prompts holds for all layers with the same window."""

    def __init__(self, module: Any) -> None:
        self._make = module.BatchPrefillWithPagedKVCacheWrapper
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[int, float], tuple[Any, object]] = {}

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, prompts: Prompts, scale: float, extras: Extras, step: object
    ) -> Tensor:
        key = (extras.window, extras.cap)
        wrapper, planned = self._wrappers.get(key, (None, None))
        if wrapper is None:
            if self._workspace is None:
                self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
            wrapper = self._make(self._workspace, "NHD")
        if planned is not step:
            self._plan(wrapper, query, keys, prompts, scale, extras)
            self._wrappers[key] = wrapper, step
        found: Tensor = wrapper.run(query, (keys, values))
        return found

    def _plan(self, wrapper: Any, query: Tensor, keys: Tensor, prompts: Prompts, scale: float, extras: Extras) -> None:
        page = keys.shape[1]
        pages = [-(-length // page) for length in prompts.lengths]
        indices = torch.cat([row[:count] for row, count in zip(prompts.pages, pages, strict=True)])
        last = [length - (count - 1) * page for length, count in zip(prompts.lengths, pages, strict=True)]
        wrapper.plan(
            qo_indptr=torch.tensor([0, *_sums(prompts.counts)], dtype=torch.int32),
            paged_kv_indptr=torch.tensor([0, *_sums(pages)], dtype=torch.int32), paged_kv_indices=indices,
            paged_kv_last_page_len=torch.tensor(last, dtype=torch.int32), num_qo_heads=query.shape[1],
            num_kv_heads=keys.shape[2], head_dim_qk=keys.shape[3], page_size=page, causal=True, sm_scale=scale,
            window_left=extras.window - 1 if extras.window else -1, logits_soft_cap=extras.cap or None,
            q_data_type=query.dtype, kv_data_type=keys.dtype,
        )  # fmt: skip


MAKE: dict[str, Any] = {"flash_attn": FlashAttention3, "flashinfer": FlashInfer}


def _sums(counts: "tuple[int, ...] | list[int]") -> Iterator[int]:
    total = 0
    for count in counts:
        total += count
        yield total


def _on(device: torch.device, numbers: "tuple[int, ...] | list[int]", dtype: torch.dtype) -> Tensor:
    """Numbers of the host on the device, for which the host does not wait."""
    held = torch.tensor(numbers, dtype=dtype)
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held


class PackageAttention(TritonAttention):
    package: Package

    def _prompts(
        self, query: Tensor, qkv: Tensor, cache: LayerCache, scale: float, out: Tensor, extras: Extras
    ) -> None:
        """See `TritonAttention._prompts`, which computes what the host does not know, and what the package has no word for."""
        known = self._batch.known
        wordless = extras.sinks is not None or extras.chunk > 0 or extras.slopes is not None
        if known is None or not known.prompts or wordless or cache.keys.dtype != query.dtype:
            super()._prompts(query, qkv, cache, scale, out, extras)
            return
        which = cache.group, extras.window
        prompts = self._of_layers.get(which)
        if prompts is None:
            blocks = self._batch.block_tables[cache.group]
            prompts = self._of_layers[which] = Prompts.of(known, blocks, cache.keys.shape[1], extras.window)
        mine = slice(prompts.begin, prompts.end)
        out[mine] = self.package.attend(query[mine], cache.keys, cache.values, prompts, scale, extras, prompts)

    def use(self, package: Package) -> "PackageAttention":
        self.package, self._of_layers = package, dict[tuple[int, int], Prompts]()
        return self


class PackageBackend(TritonBackend):
    fp8 = False
    attention: type[TritonAttention] = PackageAttention

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._package: Package | None = None

    def unsupported(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, block_size: int) -> str:
        about = PACKAGES[self.name]
        if missing := about.missing():
            return missing
        if reason := super().unsupported(spec, device, dtype, block_size):
            return reason
        if spec.mla is not None:
            return "it has no multi-head latent attention here; use auto"
        if spec.head_dim not in about.head_dims:
            sizes = ", ".join(map(str, about.head_dims))
            return f"it is used for heads of {sizes} numbers, this model has {spec.head_dim}; use auto"
        major, minor = torch.cuda.get_device_capability(device)
        if not about.first <= (major, minor) < about.beyond:
            return f"{about.needs}, this GPU has compute capability {major}.{minor}; use auto"
        windows = (0, 16) if spec.sliding_window else (0,)
        why = why_wrong(
            Result("it is", differs(self._loaded(), spec, device, dtype, block_size, window), NEAR, MEASURE)
            for window in windows
        )
        return f"{why}; use auto" if why else ""

    def _loaded(self) -> Package:
        if self._package is None:
            self._package = MAKE[self.name](importlib.import_module(PACKAGES[self.name].module))
        return self._package

    def step(self, batch: Any, block_size: int) -> TritonAttention:
        step = super().step(batch, block_size)
        assert isinstance(step, PackageAttention)
        return step.use(self._loaded())


def differs(
    package: Package, spec: ModelSpec, device: torch.device, dtype: torch.dtype, page: int, window: int
) -> float:
    """How far the package is from plain torch, in parts of the norm. NaN counts as far. Prompts lie in pages of any order, and NaN
    in all that is not theirs or is in a page before their window."""
    heads = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    step = PagedStep.random(TESTED, heads, page, dtype, device)
    firsts = [end - count for end, (_, count) in zip(step.at.ends.tolist(), TESTED, strict=True)]
    prompts = tuple(Prompt(row, start, firsts[row], count) for row, (start, count) in enumerate(TESTED))
    extras, scale = Extras(window=window, cap=spec.attn_logit_softcapping), spec.head_dim**-0.5
    wanted = attention(*step[:4], scale, extras)
    given = Prompts.of(KnownRequests(0, 0, prompts), step.at.blocks, page, window)
    step.spoil_others(lambda start: max(0, start - window + 1) if window else 0, own=True)
    found = package.attend(*step[:3], given, scale, extras, given)
    error = float(distance(found, wanted))
    return error if error == error else float("inf")
