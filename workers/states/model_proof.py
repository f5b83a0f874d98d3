"""A whole stage with its own weights by the kernels of recurrent states and of attention, layer by layer beside plain torch.

Every layer gets what plain torch made of the one before, so that roundings do not grow from layer to layer, and an expert that is
chosen by a hair changes nothing. What is compared is each operation alone, with the inputs, strides, weights and pages of serving.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshlm.kernels.ssd.reference import TimeSteps
from meshlm.workers.attention.backend import Backend, StepAttention, TorchBackend
from meshlm.workers.attention.sparse_latent import Chosen, LastChoice
from meshlm.workers.batch import StateCache, StepInputs
from meshlm.workers.engine.inputs import TorchInputs
from meshlm.workers.layers.ops import AttentionShape, LatentShape, LayerStep
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.states.proof import FAULTS, LONG, Request, step_of
from meshlm.workers.states.step import StepStates

if TYPE_CHECKING:
    from meshlm.workers.engine.engine import ModelEngine

NEAR = 0.05  # of the norm of what an operation gives one request, or of the states that it leaves: inputs and results have 16 bits


class Findings:
    """How far off each operation was, and what could not be launched."""

    def __init__(self) -> None:
        self._errors: list[tuple[str, Tensor]] = []
        self.fault = ""

    def add(self, name: str, found: Tensor, wanted: Tensor) -> None:
        """Numbers too small for 16 bits do not count."""
        scale = wanted.float().norm() + 1e-7 * wanted.numel() ** 0.5
        self._errors.append((name, (found.float() - wanted.float()).norm() / scale))

    def reason(self) -> str:
        """Why the kernels must not be used; "" when they may be."""
        if self.fault or not self._errors:
            return self.fault or "no layer has been compared"
        errors = torch.stack([error for _, error in self._errors]).nan_to_num(torch.inf)
        worst, at = errors.max(0)
        if float(worst) <= NEAR:
            return ""
        return f"{self._errors[int(at)][0]}: {float(worst):.3g} of the norm away from plain torch"


class _Both:
    """Runs an operation by the kernels and by plain torch, whose result counts."""

    def __init__(self, findings: Findings, counts: list[int]) -> None:
        self.findings, self._counts = findings, counts

    def run(self, name: str, by_kernels: Callable[[], Tensor], by_torch: Callable[[], Tensor]) -> Tensor:
        found = None
        try:
            found = by_kernels()
        except torch.OutOfMemoryError:
            raise
        except FAULTS as error:
            self.findings.fault = f"{name}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]
        wanted = by_torch()
        if found is not None:
            for one, other in zip(found.split(self._counts), wanted.split(self._counts), strict=True):
                self.findings.add(name, one, other)
        return wanted


class _BothStates:
    """See `StepStates`. Of one group, whose pages are among the first `pages`."""

    def __init__(self, both: _Both, kernels: StepStates, plain: StepStates, pages: int) -> None:
        self._both, self._kernels, self._plain, self._pages = both, kernels, plain, pages

    def _run(self, name: str, halves: Tensor, run: Callable[[StepStates], Tensor]) -> Tensor:
        pages = halves[:, : self._pages]
        before = pages.clone()
        left: list[Tensor] = []

        def by_kernels() -> Tensor:
            found = run(self._kernels)
            left.append(pages.clone())
            return found

        def by_torch() -> Tensor:
            pages.copy_(before)
            return run(self._plain)

        wanted = self._both.run(name, by_kernels, by_torch)
        for states in left:
            self._both.findings.add(f"states of {name}", states, pages)
        return wanted

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, *, silu: bool = True) -> Tensor:
        """See `StepStates.conv`."""
        return self._run("conv", cache.conv, lambda one: one.conv(x, weight, bias, cache, silu=silu))

    def ssd(self, x: Tensor, steps: TimeSteps, a: Tensor, b: Tensor, c: Tensor, d: Tensor, cache: StateCache) -> Tensor:
        """See `StepStates.ssd`."""
        return self._run("ssd", cache.ssm, lambda one: one.ssd(x, steps, a, b, c, d, cache))

    def selective_scan(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, cache: StateCache
    ) -> Tensor:
        """See `StepStates.selective_scan`."""
        return self._run("selective_scan", cache.ssm, lambda one: one.selective_scan(x, dt, a, b, c, d, gate, cache))

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor, cache: StateCache
    ) -> Tensor:
        """See `StepStates.gated_delta`."""
        return self._run("gated_delta", cache.ssm, lambda one: one.gated_delta(q, k, v, a, b, rate, bias, cache))


class _BothAttention:
    """See `StepAttention`. Plain torch writes its own keys and values over those of the kernels."""

    def __init__(
        self, both: _Both, kernels: StepAttention, plain: StepAttention, batch: StepInputs, pages: int
    ) -> None:
        """batch: the step's inputs for the kernels."""
        self._both, self._kernels, self._plain, self._batch, self._pages = both, kernels, plain, batch, pages

    def attend(
        self, qkv: Tensor, step: LayerStep, heads: AttentionShape, scale: float, sliding_window: int = 0
    ) -> Tensor:
        """See `StepAttention.attend`."""
        rest, copy = (heads, scale, sliding_window), qkv.clone()
        return self._both.run(
            "attention",
            lambda: self._kernels.attend(copy, step._replace(batch=self._batch), *rest),
            lambda: self._plain.attend(qkv, step, *rest),
        )

    def attend_latent(
        self,
        query: Tensor,
        latent: Tensor,
        step: LayerStep,
        heads: LatentShape,
        scale: float,
        chosen: Chosen | LastChoice | None = None,
    ) -> Tensor:
        """See `StepAttention.attend_latent`."""
        first, second = query.clone(), latent.clone()
        return self._both.run(
            "attention",
            lambda: self._kernels.attend_latent(first, second, step._replace(batch=self._batch), heads, scale, chosen),
            lambda: self._plain.attend_latent(query, latent, step, heads, scale, chosen),
        )

    def states(self, group: int) -> StepStates:
        """See `StepAttention.states`."""
        return _BothStates(self._both, self._kernels.states(group), self._plain.states(group), self._pages)


def of_model(engine: "ModelEngine", backend: Backend, inputs: Callable[[StepColumns], StepInputs]) -> str:
    """Why this stage must not compute by `backend`; "" when it may. The KV cache is there, and nobody's yet.

    inputs: the step's tensors for the backend. A long prompt in two chunks stands beside a short one, then both decode.
    """
    rows, size = engine.rows, engine.rows.block_size
    most = min(engine.resolved.max_model_len - 4, engine.resolved.max_num_batched_tokens - 4)
    history = [Request((min(LONG, most // 2), min(100, most // 4), 1, 1), ()), Request((2, 1, 1, 1), ())][
        : rows.max_rows
    ]
    blocks, groups = -(-sum(history[0].counts) // size), rows.num_groups
    pages = len(history) * blocks * groups
    states = [one.state for one in engine.compute.caches if one.state is not None]
    if most < 8 or pages > min((one.ssm.shape[1] for one in states), default=0):
        return "the KV cache is too small to try them"
    saved = rows.state.clone()
    ids = torch.arange(len(history) * rows.tokens.shape[1], device=rows.state.device).view(len(history), -1)
    rows.tokens[: len(history)] = (ids * 7919 + 13) % engine.resolved.spec.vocab_size
    own = torch.arange(pages, dtype=torch.int32, device=rows.state.device).view(groups, len(history), blocks)
    rows.block_tables[:, : len(history), :blocks] = own
    findings = Findings()
    try:
        with torch.inference_mode():
            for one in states:
                one.ssm[:, :pages], one.conv[:, :pages] = 0, 0
            for nth in range(len(history[0].counts)):
                _step(engine, step_of(history, nth), (backend, inputs), findings, pages)
            return findings.reason()
    except torch.OutOfMemoryError:
        raise
    except FAULTS as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]
    finally:
        rows.state.copy_(saved)


def _step(
    engine: "ModelEngine",
    step: StepColumns,
    kernels: tuple[Backend, Callable[[StepColumns], StepInputs]],
    findings: Findings,
    pages: int,
) -> None:
    backend, inputs = kernels
    batch, plain = inputs(step), TorchInputs(engine.rows).of_step(step)
    size = engine.rows.block_size
    both = _BothAttention(
        _Both(findings, step.counts.tolist()), backend.step(batch, size), TorchBackend().step(plain, size), batch, pages
    )
    before = None if engine.shard.is_first else torch.ones(step.t, engine.spec.hidden_size, device=engine.device)
    engine.model(plain, engine.compute.caches, both, None if before is None else before.to(engine.dtype))
