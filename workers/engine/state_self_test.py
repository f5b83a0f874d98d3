"""The self-test of a whole stage with its own weights: the kernels of recurrent states and of attention, layer by layer beside plain
torch.

Every layer gets what plain torch made of the one before, so that roundings do not grow from layer to layer, and an expert that is
chosen by a hair changes nothing. What is compared is each operation alone, with the inputs, strides, weights and pages of serving.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from meshlm.kernels.self_test import Result, in_one_line, why_wrong
from meshlm.workers.attention.backend import Backend, StepAttention, TorchBackend
from meshlm.workers.attention.sparse_latent import Chosen, LastChoice
from meshlm.workers.batch import StepInputs
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.kit import TorchInputs
from meshlm.workers.layers.ops import AttentionShape, LatentShape, LayerStep
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.states.self_test import LONG, Request, step_of
from meshlm.workers.states.torch_states import StepStates

NEAR = 0.05  # of the norm of what an operation gives one request, or of the states that it leaves: inputs and results have 16 bits


class Findings:
    """How far off each operation was, and what could not be launched."""

    def __init__(self) -> None:
        self._results: list[Result] = []
        self.fault = ""

    def add(self, name: str, found: Tensor, wanted: Tensor) -> None:
        """Numbers too small for 16 bits do not count."""
        scale = wanted.float().norm() + 1e-7 * wanted.numel() ** 0.5
        self._results.append(Result(f"{name}:", (found.float() - wanted.float()).norm() / scale, NEAR))

    def worst(self) -> Result:
        """Waits for the device once."""
        if not self._results:
            raise ValueError("no layer has been compared")
        errors = torch.stack([torch.as_tensor(result.error) for result in self._results]).nan_to_num(torch.inf)
        return self._results[int(errors.argmax())]


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
        except Exception as error:  # of a compiler or a driver; plain torch computes
            self.findings.fault = f"{name}: {in_one_line(error)}"
        wanted = by_torch()
        if found is not None:
            for one, other in zip(found.split(self._counts), wanted.split(self._counts), strict=True):
                self.findings.add(name, one, other)
        return wanted


class _BothStates:
    """The operations of `StepStates`, whose last argument is the cache. The group's pages are among the first `pages`."""

    def __init__(self, both: _Both, kernels: StepStates, plain: StepStates, pages: int) -> None:
        self._both, self._kernels, self._plain, self._pages = both, kernels, plain, pages

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        return partial(self._run, name)

    def _run(self, name: str, *given: Any, **more: Any) -> Tensor:
        pages = (given[-1].conv if name == "conv" else given[-1].ssm)[:, : self._pages]
        before, left = pages.clone(), list[Tensor]()

        def by_kernels() -> Tensor:
            found: Tensor = getattr(self._kernels, name)(*given, **more)
            left.append(pages.clone())
            return found

        def by_torch() -> Tensor:
            pages.copy_(before)
            found: Tensor = getattr(self._plain, name)(*given, **more)
            return found

        wanted = self._both.run(name, by_kernels, by_torch)
        for states in left:
            self._both.findings.add(f"states of {name}", states, pages)
        return wanted


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
        first, second = query.clone(), latent.clone()
        return self._both.run(
            "attention",
            lambda: self._kernels.attend_latent(first, second, step._replace(batch=self._batch), heads, scale, chosen),
            lambda: self._plain.attend_latent(query, latent, step, heads, scale, chosen),
        )

    def states(self, group: int) -> StepStates:
        both = _BothStates(self._both, self._kernels.states(group), self._plain.states(group), self._pages)
        return cast(StepStates, both)


def self_test_model(engine: ModelEngine, backend: Backend, inputs: Callable[[StepColumns], StepInputs]) -> str:
    """Why this stage must not compute by `backend`; "" when it may. The KV cache is there, and nobody's yet.

    inputs: the step's tensors for the backend. A long prompt in two chunks stands beside a short one, then both decode."""
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

    def results() -> Iterator[Result]:
        for one in states:
            one.ssm[:, :pages], one.conv[:, :pages] = 0, 0
        for nth in range(len(history[0].counts)):
            _step(engine, step_of(history, nth), (backend, inputs), findings, pages)
        if not findings.fault:
            yield findings.worst()

    try:
        why = why_wrong(results())
        return findings.fault or why
    finally:
        rows.state.copy_(saved)


def _step(
    engine: ModelEngine,
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
