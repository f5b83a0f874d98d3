"""Attention backends: what they are, and which one a device gets."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from meshlm.protocol.model import ModelSpec
from meshlm.runtime.attention_packages import PACKAGES
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.attention.sparse_latent import ToChoose
from meshlm.workers.attention.torch_backend import TorchAttention
from meshlm.workers.batch import CrossCache, StepInputs
from meshlm.workers.layers.ops import AttentionShape, LatentShape, LayerStep
from meshlm.workers.states.torch_states import StepStates


class StepAttention(Protocol):
    def attend(
        self, qkv: Tensor, step: LayerStep, heads: AttentionShape, scale: float, sliding_window: int = 0
    ) -> Tensor:
        """qkv [t, (heads + 2 kv_heads) d] as projected -> [t, heads, d]. Keys and values are in the cache afterwards.
        sliding_window 0: all keys."""

    def attend_latent(
        self, query: Tensor, latent: Tensor, step: LayerStep, heads: LatentShape, scale: float, chosen: ToChoose = None
    ) -> Tensor:
        """Multi-head latent attention: query [t, heads, nope + rotary], latent [t, rank + rotary] as projected -> [t, heads, wide].
        Both may be changed. The latents are in the cache afterwards, normed and with their keys rotated. chosen: a query attends to
        the tokens that this chooses, whose keys are in the cache afterwards, behind the latents, or to the last index's choice."""

    def attend_cross(self, query: Tensor, cache: CrossCache, scale: float) -> Tensor:
        """query [t, heads, d] -> [t, heads, d]: each token sees all that an encoder left for its request."""

    def states(self, group: int) -> StepStates:
        """The computation of this group's layers with recurrent states in the step."""


class Backend(Protocol):
    """A way to compute attention on a device."""

    name: str
    graphs: bool  # may be captured in a CUDA graph when all requests decode one token
    fp8: bool  # reads and writes a cache of 8-bit floats

    def unsupported(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, block_size: int) -> str:
        """Why it cannot serve this model here; "" when it can."""

    def step(self, batch: StepInputs, block_size: int) -> StepAttention: ...


class TorchBackend:
    name, graphs, fp8 = "torch", False, True

    def unsupported(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, block_size: int) -> str:
        return ""

    def step(self, batch: StepInputs, block_size: int) -> StepAttention:
        return TorchAttention(batch, block_size)


def _imported(module: str, name: str, *arguments: str) -> Backend:
    """A backend of this folder, imported when it is wanted: triton may not even be installed beside a CPU build of torch."""
    found: Backend = getattr(import_module(f"meshlm.workers.attention.{module}"), name)(*arguments)
    return found


# By name, the one to prefer first.
BACKENDS: dict[str, Callable[[], Backend]] = {
    "cpu": partial(_imported, "cpu_backend", "CpuBackend"),
    "triton": partial(_imported, "triton_backend", "TritonBackend"),
    "torch": TorchBackend,
    **{name: partial(_imported, "packages", "PackageBackend", name) for name in PACKAGES},
}


def register(name: str, make: Callable[[], Backend]) -> None:
    """Let --attention-backend name a plug-in's; auto does not choose it. ValueError: there is one of that name."""
    if name in BACKENDS or name == "auto":
        raise ValueError(f"--attention-backend {name} is taken already")
    if not callable(make):
        raise TypeError(f"something that makes a Backend expected, got {type(make).__name__}")
    BACKENDS[name] = make


def choose(
    wanted: str,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    order: Sequence[str] = ("torch",),
) -> Backend:
    """The named backend, or with "auto" the first in the platform's `order` that can. ProcessFatal says why none can."""
    if spec.encoder_only:
        if wanted not in ("auto", "torch"):
            raise ProcessFatal(f"--attention-backend {wanted}: an encoder has no KV cache; use auto")
        return _imported("encoder", "EncoderBackend")
    reason = ""
    for name in order if wanted == "auto" else (wanted,):
        if name not in BACKENDS:
            raise ProcessFatal(f"--attention-backend {name}: there are auto, {', '.join(BACKENDS)}")
        backend = BACKENDS[name]()
        if not (reason := backend.unsupported(spec, device, dtype, block_size)):
            return backend
    raise ProcessFatal(f"--attention-backend {wanted}: {reason}")
