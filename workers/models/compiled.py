"""--compile inductor: what stands between two attention calls as one function, compiled by torch.

    attention | o, residual add, norm, gate and up, activation, down, residual add, next norm, next qkv | attention ...

The weights are arguments, so one compiled function serves all layers; the number of tokens is a dynamic size. Attention stays a call
of the backend, and CUDA graphs are captured on top as ever. Attached by the CUDA engine before its first step; never used on several
ranks, whose sums would stand inside the functions.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.silu_mul.reference import ACTIVATIONS
from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import MLP, Linear
from meshlm.workers.models.decoder import Decoder, DecoderLayer

Weights = tuple[Tensor, Tensor | None]  # of a product: weight, bias


class CompiledLayers:
    def __init__(self, spec: ModelSpec, compiler: Callable[..., Any] = torch.compile, shapes: str = "backed") -> None:
        """shapes: --compile-dynamic-shapes."""
        self._dynamic = SHAPES[shapes]
        eps, act = spec.rms_norm_eps, ACTIVATIONS[spec.hidden_act]

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(x, weight.shape, weight, eps)

        def embedded(ids: Tensor, table: Tensor, weight: Tensor, qkv: Weights) -> tuple[Tensor, Tensor]:
            return first(F.embedding(ids, table), weight, qkv)

        def first(residual: Tensor, weight: Tensor, qkv: Weights) -> tuple[Tensor, Tensor]:
            return F.linear(norm(residual, weight), *qkv), residual

        def block(out: Tensor, residual: Tensor, o: Weights, weight: Tensor, gate_up: Weights, down: Weights) -> Tensor:
            residual = residual + F.linear(out, *o)
            gate, up = F.linear(norm(residual, weight), *gate_up).chunk(2, dim=-1)
            return residual + F.linear(act(gate) * up, *down)

        def between(out: Tensor, residual: Tensor, own: Any, weight: Tensor, qkv: Weights) -> tuple[Tensor, Tensor]:
            residual = block(out, residual, *own)
            return F.linear(norm(residual, weight), *qkv), residual

        def last(out: Tensor, residual: Tensor, own: Any, weight: Tensor) -> Tensor:
            return norm(block(out, residual, *own), weight)

        self._embedded, self._first, self._between, self._last = (
            compiler(part, fullgraph=True, dynamic=False) for part in (embedded, first, between, last)
        )

    def run(self, model: Decoder, batch: StepInputs, caches: list[LayerCache], attention: StepAttention) -> Tensor:
        """Hidden states [t, hidden] after the last norm."""
        layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
        assert model.embed is not None and model.norm is not None  # noqa: PT018
        context = ForwardContext(batch, model.rope, attention, model.ops)
        table, weight, product = model.embed.weight, layers[0].input_norm.weight, _weights(layers[0].attention.qkv)
        if batch.vectors is None:
            qkv, residual = self._embedded(self._dynamic(batch.input_ids), table, weight, product)
        else:
            entered = batch.with_vectors(F.embedding(batch.known_ids, table))
            qkv, residual = self._first(self._dynamic(entered), weight, product)
        for nth, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            out = self._dynamic(layer.attention.attend(qkv, cache, context))
            assert isinstance(layer.mlp, MLP)
            own = (
                _weights(layer.attention.o),
                layer.post_norm.weight,
                _weights(layer.mlp.gate_up),
                _weights(layer.mlp.down),
            )
            if nth + 1 < len(layers):
                after = layers[nth + 1]
                qkv, residual = self._between(
                    out, self._dynamic(residual), own, after.input_norm.weight, _weights(after.attention.qkv)
                )
        found: Tensor = self._last(out, self._dynamic(residual), own, model.norm.weight)
        return found


def _weights(linear: Linear) -> Weights:
    return linear.weight, linear.bias


def _backed(x: Tensor) -> Tensor:
    """Any number of tokens from 2 up is one compiled function; 1 is another."""
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def _unbacked(x: Tensor) -> Tensor:
    """Nothing may be assumed of the number of tokens: a branch on it is an error instead of a guard."""
    torch._dynamo.decorators.mark_unbacked(x, 0)
    return x


def _size_oblivious(x: Tensor) -> Tensor:
    """The first number of tokens is known, but no branch may treat 0 or 1 as a case of its own."""
    experimental: Any = torch.fx.experimental._config
    experimental.backed_size_oblivious = True
    return _backed(x)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "backed": _backed,
    "unbacked": _unbacked,
    "backed_size_oblivious": _size_oblivious,
}


def use_cache(spec: ModelSpec, dtype: torch.dtype, root: Path) -> Path:
    """Let the compiler keep its results in a directory of this torch, GPU, dtype and model. Before the first compilation."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts = [str(torch.__version__), torch.version.cuda, _triton_version(), gpu, str(dtype)]
    key = hashlib.sha256(msgspec.json.encode([facts, spec])).hexdigest()[:16]
    folder = root / key
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of processes would outlive a killed worker
    return folder


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshlm" / "inductor"
