"""The engine on an NVIDIA GPU: persistent rows on the device, CUDA graphs for decodes, nothing that waits for the device.

A step: copy its columns and changes (one transfer), scatter the changes, then either replay the graph of the padded batch size
(inputs, model, sampling) or launch the same kernels one by one. Sampled tokens are written behind their rows on the device, where the
next step finds them, and go to the host behind an event. Used by the stepper thread only (workers/io.py).
"""

import time
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.kernels.attention.tiles import warm_sizes
from meshlm.kernels.gate_up_silu import kernel as gate_up_silu
from meshlm.kernels.precompile import precompiled
from meshlm.kernels.small_m_gemm import kernel as small_m_gemm
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.control_edge import GraphCounts
from meshlm.protocol.model import ModelSpec
from meshlm.protocol.step_edge import StepPlan, StepResult
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers import memory
from meshlm.workers.attention.backend import Backend
from meshlm.workers.batch import LayerCache
from meshlm.workers.cuda import kernel_cache, warm_up
from meshlm.workers.cuda.checks import check_gpu
from meshlm.workers.cuda.columns import Columns32, PendingStep, columns_of, event_now
from meshlm.workers.cuda.compute import Compute
from meshlm.workers.cuda.graphs import MIXED_TOKENS, Dispatcher, graph_keys
from meshlm.workers.cuda.inbox import Inbox, Staging
from meshlm.workers.cuda.logits_sampler import LINES, Details, LogitsSampler
from meshlm.workers.cuda.state import DeviceRows
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.engine import EngineFacts, ProgressReport
from meshlm.workers.models.decoder import Parts
from meshlm.workers.sampling.sampler import SampleRows
from meshlm.workers.sampling.table import SamplingTable
from meshlm.workers.weights.load import DTYPES, load_model, weight_bytes

MB = 1 << 20
_log = structlog.get_logger()


class CudaEngine:
    """See `meshlm.workers.engine.Engine`."""

    def __init__(
        self, config: MeshConfig, backend: Backend, report: ProgressReport, placement: WorkerPlacement | None = None
    ) -> None:
        resolved = config.resolved
        assert resolved is not None
        placement = placement or WorkerPlacement()
        self._shard, self._spec = placement.shard, placement.shard.local(resolved.spec)
        self._config, self._resolved = config, resolved
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._others = memory.taken_by_others()
        self._dtype = DTYPES[resolved.dtype]
        self._block_size = config.cache.block_size
        self._cache_dtype = memory.cache_dtype(config.cache.kv_cache_dtype, self._dtype, self._device, backend)

        def progress(done: int, total: int) -> None:
            report("weights", done // MB, total // MB, "MB")

        self._model = load_model(resolved, self._device, config.model.seed or 0, progress, placement.shard)
        if config.worker.compile == "inductor":
            self._model.parts = _compiled(resolved.spec, self._dtype)
        tokens, hidden = max(resolved.max_num_batched_tokens + 2, MIXED_TOKENS[0]), resolved.spec.hidden_size
        self._comm = placement.connect(self._device, self._dtype, tokens, hidden)
        self._model.join(self._comm)
        self._stream = torch.empty(0)  # pipelines: where the stage before writes, and what the next one takes
        if not (self._shard.is_first and self._shard.is_last):
            self._stream = torch.zeros(tokens, hidden, dtype=self._dtype, device=self._device)
        rows = resolved.max_num_seqs
        self._rows = DeviceRows(rows, resolved.max_model_len, self._block_size, self._device)
        self._sampling = SamplingTable(rows)
        self._inbox = Inbox(self._rows, Staging(), self._device)
        self._answers = [torch.empty(rows, dtype=torch.int32, pin_memory=True) for _ in range(8)]
        self._num_steps = 0
        lines = LINES if self._shard.is_last else 0
        self.head = LogitsSampler(self._model, self._rows, self._dtype, self._device, lines)
        self._compute = Compute(self._model, backend, self._shard, self._rows, self._inbox, self.head, self._stream)
        worker = config.worker
        mode = "NONE" if worker.enforce_eager else worker.cudagraph_mode
        parameters = sum(p.numel() for p in self._model.layers.parameters())
        keys = graph_keys(mode, rows, resolved.max_num_batched_tokens, worker.cudagraph_capture_sizes, parameters)
        self.graphs = Dispatcher(keys, self._compute.padded, self._on_all_ranks if self._shard.tp_size > 1 else None)
        self._compile_ahead(report)
        count = self._num_blocks(report)
        self._compute.caches = self._make_caches(count)
        report("KV cache", count, count, "blocks")
        self._warm_up()
        if self._shard.size > 1:  # a capture in idle time would meet the other ranks in the middle of a step
            self._capture_all(report)
        else:
            self._capture_first(report)
        self._last = event_now()
        gib = weight_bytes(self._model) / 2**30
        shown = {"weights": f"{gib:.2f} GiB", "KV cache": f"{count * self._block_size} tokens"}
        self.facts = EngineFacts(count, self._block_size, rows, resolved.spec.vocab_size, shown)

    # --- memory ---

    def _num_blocks(self, report: ProgressReport) -> int:
        wanted = self._config.cache.kv_cache_memory
        if wanted is None:
            report("memory profile", 0, 1, "")
            share = self._config.cache.gpu_memory_utilization
            wanted = memory.profile(share, self._others, lambda: self._make_caches(1), self._full_step)
        return memory.num_blocks(self._config, wanted, self._cache_dtype, self._spec)

    def _make_caches(self, count: int) -> list[LayerCache]:
        scales = self._model.kv_scales()
        return memory.make_caches(self._spec, count, self._block_size, self._cache_dtype, self._device, scales)

    def _full_step(self, caches: list[LayerCache]) -> None:
        self._compute.caches = caches
        self._dummy_step(self._full_counts())
        if self._shard.is_last:
            self.head.warm_up()
        self._compute.caches = []

    def _full_counts(self) -> list[int]:
        return memory.full_step(self._resolved.max_num_batched_tokens, self._resolved.max_model_len)

    def _dummy_step(self, counts: list[int]) -> None:
        """Prompts of the dummy row: reads block 0, writes nowhere that counts."""
        n = min(len(counts), self._rows.max_rows)
        step = columns_of(
            np.full(n, self._rows.max_rows, np.int32), np.zeros(n, np.int32), np.array(counts[:n], np.int32)
        )
        with torch.inference_mode():  # as steps run: a compiler takes other tensors for another case
            self._inbox.send(step, n, np.empty(0, np.int32), 0, np.arange(n))
            self._compute.eager(step)

    def _compile_ahead(self, report: ProgressReport) -> None:
        """Have the kernels of all dummy steps, none of which waits for them. What torch itself computes here is nonsense.

        Every rank of a group does so, whether its kernels are cached or not: there are collectives in these steps.
        """
        if self._model.parts is not None:  # torch's compiler launches its own kernels
            return
        caches = self._make_caches(1)
        try:
            with self._model.shortened() as layers, precompiled(lambda done, of: report("kernels", done, of, "")):
                self._compute.caches = caches[:layers]
                self._dummy_step(self._full_counts())
                self._warm_up()
        except torch.OutOfMemoryError:  # the memory profile says it better
            if self._shard.size > 1:  # the others are in the middle of a step
                raise
        finally:
            self._compute.caches = []

    def _warm_up(self) -> None:
        """Every kernel is compiled here, in each variant that steps use. Block 0 holds nothing yet."""
        longest = self._rows.blocks.shape[1] * self._block_size
        most = self._rows.max_rows
        kv_heads = self._spec.num_key_value_heads
        group = self._spec.num_attention_heads // kv_heads
        decodes = warm_sizes(kv_heads, most, longest, self._device, group)
        tokens = self._resolved.max_num_batched_tokens
        prompt = min(tokens, self._resolved.max_model_len)
        rows = small_m_gemm.warm_rows() | gate_up_silu.warm_rows()
        for counts in warm_up.steps(decodes, rows, most, prompt, tokens):
            self._dummy_step(counts)
        self._inbox.clear()
        with torch.inference_mode():
            for key in warm_up.graphs(self.graphs.keys, rows, min(tokens, most * prompt)):
                self._compute.padded(key)
            if self._shard.is_last:
                self.head.one_line()
        empty = np.array([0, 0, 1, 0], np.int32)  # one segment: the first token of row 0
        self._inbox.send(columns_of(*(np.zeros(1, np.int32) for _ in range(3))), 1, empty, 1, np.arange(0))
        torch.cuda.synchronize()

    # --- steps ---

    def reset(self) -> None:
        self._sampling.special.clear()

    def idle(self) -> bool:
        """Capture a graph, unless steps are on their way. Its inputs are padding, so that it computes nothing that counts."""
        if self.graphs.complete or self._shard.size > 1:
            return False
        last: Any = self._last  # typed in some versions of torch only
        if not last.query():
            return True
        try:
            self._capture_next()
        except torch.OutOfMemoryError as error:
            self.graphs.abandon(error)
        return True

    def _capture_next(self) -> None:
        self._inbox.clear()
        with torch.inference_mode():
            self.graphs.background()

    def _capture_all(self, report: ProgressReport) -> None:
        """All ranks must have the same graphs: none may do without one for want of memory."""
        total = len(self.graphs.keys)
        for done in range(total):
            self._capture_next()
            report("CUDA graphs", done + 1, total, "")

    def _capture_first(self, report: ProgressReport) -> None:
        """What no request should meet being captured; all of them where requests leave no idle time for it."""
        first = self.graphs.first(everything=self._config.worker.cudagraph_capture == "start")
        self._inbox.clear()
        try:
            with torch.inference_mode():
                for done, key in enumerate(first, 1):
                    self.graphs.make(key)
                    report("CUDA graphs", done, len(first), "")
        except torch.OutOfMemoryError as error:
            self.graphs.abandon(error)

    def _on_all_ranks(self, worked: bool) -> bool:
        votes = torch.full((8,), float(worked), dtype=self._dtype, device=self._device)
        return int(self._comm.all_reduce(votes)[0].item()) == self._shard.tp_size

    def graph_counts(self) -> GraphCounts:
        return GraphCounts(dict(self.graphs.replays), dict(self.graphs.misses))

    def step(self, plan: StepPlan, received_ns: int) -> PendingStep:
        with torch.inference_mode():
            return self._step(plan, received_ns)

    def _step(self, plan: StepPlan, received_ns: int) -> PendingStep:
        for new in plan.new_rows:
            self._sampling.set(new.row, new.sampling)
        changes, segments = self._rows.changes(plan)
        step = Columns32(plan)
        places = step.places()
        key = None
        wanted = self._sampling.of_prompt(step.rows, step.starts, self._rows.num_prompt[step.rows])
        if len(wanted):
            self.graphs.miss("prompt_logprobs")
        else:
            key = self.graphs.find(step.t, step.n, uniform=step.uniform)
        self._inbox.send(step, key.requests if key else step.n, changes, segments, places)
        if not self._shard.is_first:
            self._comm.receive(self._stream[: step.t])
        if key is not None:
            self.graphs.prepare(key)  # before `begin`: the host's time for it says nothing about the step
        begin = event_now()
        of_prompt: list[Details] = []
        if key is not None:
            self.graphs.replay(key)
        else:
            hidden = self._compute.eager(step)
            if self._shard.is_last:
                of_prompt = self._prompt_logprobs(step, hidden, wanted)
        if not self._shard.is_last:
            self._comm.send(self._stream[: step.t])
        found = self._finish(step, places) if self._shard.is_last and len(places) else []
        answer = self._answers[self._num_steps % len(self._answers)][: len(places)]
        self._num_steps += 1
        answer.copy_(self.head.sampled[: len(places)], non_blocking=True)
        before, self._last = self._last, event_now()
        result = StepResult(
            session=plan.session,
            step=plan.step,
            token_ids=b"",
            received_ns=received_ns,
            launched_ns=time.monotonic_ns(),
        )
        return PendingStep(result, answer.numpy(), (found, of_prompt), before, begin, self._last)

    def _finish(self, step: Columns32, places: NDArray[np.int64]) -> list[Details]:
        """After the graph or its kernels: what they could not do, of the requests at these places."""
        rows = step.rows[places]
        lens = (step.starts + step.counts)[places].astype(np.int64)
        prompt_lens = self._rows.num_prompt[rows]
        self.head.by_torch(SampleRows(rows, lens - prompt_lens, lens, prompt_lens), self._sampling)
        found = self.head.logprobs(rows, places, self._sampling)
        return [] if found is None else [found]

    def _prompt_logprobs(self, step: Columns32, hidden: Tensor, wanted: NDArray[np.intp]) -> list[Details]:
        """For the requests at these places: the prompt tokens that follow the positions of this step."""
        found = []
        for place in wanted.tolist():
            row, start, count = int(step.rows[place]), int(step.starts[place]), int(step.counts[place])
            last = min(start + count, int(self._rows.num_prompt[row]) - 1)
            begin = int(step.counts[:place].sum())
            states = hidden[begin : begin + last - start]
            width = int(self._sampling.prompt_logprobs[row])
            found.append(self.head.prompt_logprobs(states, row, start, place, width))
        return found


def _compiled(spec: ModelSpec, dtype: torch.dtype) -> Parts:
    from meshlm.workers.models import compiled  # imports torch's compiler: two seconds

    folder = compiled.use_cache(spec, dtype, compiled.cache_root())
    _log.info("torch.compile", cache=str(folder))
    return compiled.CompiledParts(spec)


def make_cuda_engine(
    config: MeshConfig, report: ProgressReport, placement: WorkerPlacement | None = None
) -> "CudaEngine | None":
    """The engine for this GPU, or None (said once) where only plain torch works."""
    from meshlm.workers.attention import backend as backends

    resolved: Resolved | None = config.resolved
    assert resolved is not None
    check_gpu()
    placement = placement or WorkerPlacement()
    device = placement.take_gpu()
    dtype = DTYPES[resolved.dtype]
    name = config.worker.attention_backend
    chosen = backends.choose(name, placement.shard.local(resolved.spec), device, dtype, config.cache.block_size)
    if not chosen.graphs:
        if name == "auto":
            reason = backends.BACKENDS["triton"]().unsupported(resolved.spec, device, dtype, config.cache.block_size)
            _log.warning("plain torch computes: no --attention-backend triton here", reason=reason)
        return None
    torch.set_grad_enabled(False)
    try:
        return kernel_cache.retry_without(
            lambda: CudaEngine(config, chosen, report, placement),
            kernel_cache.folder(),
            alone=placement.shard.size == 1,
        )
    except torch.OutOfMemoryError as error:
        raise ProcessFatal(
            f"the GPU's memory is full: {str(error).splitlines()[0]} Lower --gpu-memory-utilization, "
            "--max-num-seqs or --max-num-batched-tokens"
        ) from None
