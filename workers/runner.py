"""The engine on a real device: model, KV tensors, one step after the other. Used by the stepper thread only (io.py).

On CUDA everything is queued on one stream and nothing waits for the device: sampled tokens are written into the device's own
token table, where the next step finds them, and go to the host behind an event.
"""

import os
import time

import numpy as np
import torch
from torch import Tensor

from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.control_edge import GraphCounts
from meshlm.protocol.step_edge import StepPlan, StepResult
from meshlm.protocol.token_edge import LogprobColumns
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers import memory
from meshlm.workers.attention import backend as attention_backends
from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.batch import ForwardBatch, LayerCache
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.engine import EngineFacts, ProgressReport
from meshlm.workers.rows import I32, I64, RowTable, StepArrays
from meshlm.workers.sampling import logprobs
from meshlm.workers.sampling.sampler import SampleRows, sample
from meshlm.workers.sampling.table import SamplingTable
from meshlm.workers.weights.load import DTYPES, load_model, weight_bytes

MB = 1 << 20


class PendingStep:
    """A step on its way; its tokens are valid after the event."""

    def __init__(self, result: StepResult, tokens: Tensor, event: "torch.cuda.Event | None") -> None:
        self._result, self._tokens, self._event = result, tokens, event

    def wait(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        result = self._result
        return StepResult(
            session=result.session,
            step=result.step,
            token_ids=self._tokens.numpy().tobytes(),
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
            received_ns=result.received_ns,
            launched_ns=result.launched_ns,
            done_ns=time.monotonic_ns(),
        )


class TorchEngine:
    """See `meshlm.workers.engine.Engine`."""

    def __init__(self, config: MeshConfig, report: ProgressReport, placement: WorkerPlacement | None = None) -> None:
        resolved = config.resolved
        assert resolved is not None
        placement = placement or WorkerPlacement()
        self._config, self._resolved, self._shard = config, resolved, placement.shard
        self._spec = placement.shard.local(resolved.spec)
        self._device = _device(resolved, placement)
        self._others = memory.taken_by_others() if self._device.type == "cuda" else 0
        torch.set_grad_enabled(False)
        if self._device.type == "cpu":
            torch.set_num_threads(config.worker.cpu_threads or len(os.sched_getaffinity(0)))
        self._dtype = DTYPES[resolved.dtype]

        def progress(done: int, total: int) -> None:
            report("weights", done // MB, total // MB, "MB")

        self._attention = attention_backends.choose(
            config.worker.attention_backend, self._spec, self._device, self._dtype, config.cache.block_size
        )
        memory.cache_dtype(config.cache.kv_cache_dtype, self._dtype, self._device, self._attention)  # refuses FP8
        self._model = load_model(resolved, self._device, config.model.seed or 0, progress, placement.shard)
        if self._device.type == "cpu":
            from meshlm.workers.models.cpu_layers import fuse

            fuse(self._model, self._attention.name)
        tokens, hidden = resolved.max_num_batched_tokens, resolved.spec.hidden_size
        self._comm = placement.connect(self._device, self._dtype, tokens, hidden)
        self._model.join(self._comm)
        rows = resolved.max_num_seqs
        self._rows = RowTable(rows, resolved.max_model_len, config.cache.block_size)
        self._sampling = SamplingTable(rows)
        self._tokens = torch.from_numpy(self._rows.tokens)  # on the CPU the very same memory
        if self._device.type == "cuda":
            self._tokens = torch.zeros(self._rows.tokens.shape, dtype=torch.int32, device=self._device)
        count = self._num_blocks(report)
        self._caches = self._make_caches(count)
        report("KV cache", count, count, "blocks")
        self._warm_up()
        gib = weight_bytes(self._model) / 2**30
        shown = {"weights": f"{gib:.2f} GiB", "KV cache": f"{count * config.cache.block_size} tokens"}
        self.facts = EngineFacts(count, config.cache.block_size, rows, resolved.spec.vocab_size, shown)

    # --- memory ---

    def _num_blocks(self, report: ProgressReport) -> int:
        wanted = self._config.cache.kv_cache_memory
        if wanted is None and self._device.type == "cpu":
            wanted = memory.cpu_budget()
        elif wanted is None:
            report("memory profile", 0, 1, "")
            length = min(self._resolved.max_num_batched_tokens, self._resolved.max_model_len)
            blocks = -(-length // self._config.cache.block_size)
            share = self._config.cache.gpu_memory_utilization
            wanted = memory.profile(share, self._others, lambda: self._make_caches(blocks), self._full_step)
        return memory.num_blocks(self._config, wanted, self._dtype, self._spec)

    def _make_caches(self, count: int) -> list[LayerCache]:
        block_size = self._config.cache.block_size
        return memory.make_caches(self._spec, count, block_size, self._dtype, self._device)

    def _full_step(self, caches: list[LayerCache]) -> None:
        self._caches = caches
        self._run_dummy(memory.full_step(self._resolved.max_num_batched_tokens, self._resolved.max_model_len))
        self._caches = []

    def _warm_up(self) -> None:
        """One small step, so that no first request pays for it. Writes to block 0, which holds nothing yet."""
        self._run_dummy([1])

    def _run_dummy(self, counts: list[int]) -> None:
        """Prompts of so many tokens, all in the same blocks, and logits for a full batch."""
        positions = np.concatenate([np.arange(count) for count in counts])
        blocks = -(-max(counts) // self._config.cache.block_size)
        index = torch.from_numpy(positions).to(self._device)
        batch = ForwardBatch(
            input_ids=torch.zeros_like(index),
            positions=index,
            slot_mapping=index,
            block_tables=torch.arange(blocks, device=self._device).repeat(len(counts), 1),
            seq_lens=torch.tensor(counts, device=self._device),
            logits_indices=torch.zeros(
                min(self._resolved.max_num_seqs, sum(counts)), dtype=torch.long, device=self._device
            ),
            num_decodes=0,
            query_lens=tuple(counts),
            context_lens=tuple(counts),
            max_decode_len=0,
        )
        attention = self._attention.step(batch, self._config.cache.block_size)
        hidden = self._forward(batch, attention)
        if not self._shard.is_last:
            return
        logits = self._model.logits(hidden[batch.logits_indices])
        logits.float().softmax(dim=-1).double().cumsum(dim=-1)  # what sampling allocates at most

    def _forward(self, batch: ForwardBatch, attention: StepAttention) -> Tensor:
        """This stage's part of the model: hidden states [t, hidden], which only the last stage can make logits of."""
        stream = None
        if not self._shard.is_first:
            shape = (len(batch.input_ids), self._spec.hidden_size)
            stream = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._comm.receive(stream)
        hidden: Tensor = self._model(batch, self._caches, attention, stream)
        if not self._shard.is_last:
            self._comm.send(hidden)
        return hidden

    # --- steps ---

    def reset(self) -> None:
        self._rows.reset()
        self._sampling.special.clear()

    def idle(self) -> bool:
        return False

    def graph_counts(self) -> GraphCounts:
        return GraphCounts()

    def step(self, plan: StepPlan, received_ns: int) -> PendingStep:
        with torch.inference_mode():
            return self._step(plan, received_ns)

    def _step(self, plan: StepPlan, received_ns: int) -> PendingStep:
        begun = time.monotonic_ns()
        self._rows.apply(plan)
        for new in plan.new_rows:
            self._sampling.set(new.row, new.sampling)
            if self._device.type == "cuda":
                ids = torch.frombuffer(bytearray(new.token_ids), dtype=torch.int32).pin_memory()
                self._tokens[new.row, : len(ids)].copy_(ids, non_blocking=True)
        arrays = self._rows.step(plan)
        if plan.input_ids and self._device.type == "cuda":
            known = torch.frombuffer(bytearray(plan.input_ids), dtype=torch.int32).long()
            rows, starts = (torch.from_numpy(column[: len(known)].astype(np.int64)) for column in arrays[:2])
            self._tokens[rows.to(self._device), starts.to(self._device)] = known.to(self._device).int()
        batch = self._batch(arrays)
        attention = self._attention.step(batch, self._config.cache.block_size)
        hidden = self._forward(batch, attention)
        of_prompt: dict[int, LogprobColumns] = {}
        found: dict[int, LogprobColumns] = {}
        token_ids = torch.empty(0, dtype=torch.int32, device=self._device)
        if self._shard.is_last:
            of_prompt = self._prompt_logprobs(arrays, hidden)
            token_ids, found = self._sample(arrays, hidden, batch)
        result = StepResult(
            session=plan.session,
            step=plan.step,
            token_ids=b"",
            logprobs=found,
            prompt_logprobs=of_prompt,
            received_ns=received_ns,
            launched_ns=begun if self._device.type == "cpu" else time.monotonic_ns(),  # a CPU computes as it launches
        )
        return self._to_host(result, token_ids)

    def _to_host(self, result: StepResult, token_ids: Tensor) -> PendingStep:
        if self._device.type == "cpu":
            return PendingStep(result, token_ids, None)
        tokens = torch.empty(token_ids.shape, dtype=torch.int32, pin_memory=True)
        tokens.copy_(token_ids, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return PendingStep(result, tokens, event)

    def _batch(self, arrays: StepArrays) -> ForwardBatch:
        """The step's tensors. Token ids come from the device's table: a token sampled in the last step is there already."""
        device = self._device
        block_size = self._config.cache.block_size
        ends = arrays.starts + arrays.counts
        num_decodes = int((arrays.counts == 1).sum())
        blocks = -(-int(ends.max()) // block_size)

        def put(values: I32 | I64) -> Tensor:
            tensor = torch.from_numpy(np.ascontiguousarray(values, np.int64))
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

        positions, token_rows = put(arrays.positions), put(arrays.token_rows)
        return ForwardBatch(
            input_ids=self._tokens[token_rows, positions].long(),
            positions=positions,
            slot_mapping=put(arrays.slots),
            block_tables=put(self._rows.blocks[arrays.rows, :blocks]),
            seq_lens=put(ends),
            logits_indices=put((arrays.query_start[1:] - 1)[arrays.samples]),
            num_decodes=num_decodes,
            query_lens=tuple(arrays.counts[num_decodes:].tolist()),
            context_lens=tuple(ends[num_decodes:].tolist()),
            max_decode_len=int(ends[:num_decodes].max()) if num_decodes else 0,
        )

    def _sample(
        self, arrays: StepArrays, hidden: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, dict[int, LogprobColumns]]:
        """int32 [l] on the device, written into the token table; logprobs by batch place."""
        places = np.flatnonzero(arrays.samples)
        if not len(places):
            return torch.empty(0, dtype=torch.int32, device=self._device), {}
        rows = arrays.rows[places]
        lens = (arrays.starts + arrays.counts)[places].astype(np.int64)
        prompt_lens = self._rows.num_prompt[rows].astype(np.int64)
        at = SampleRows(rows, lens - prompt_lens, lens, prompt_lens)
        logits = self._model.logits(hidden[batch.logits_indices])
        wanted = np.flatnonzero(self._sampling.logprobs[rows] >= 0)
        raw = logits[torch.from_numpy(wanted).to(self._device)].clone() if len(wanted) else None
        token_ids = sample(logits, at, self._sampling, self._tokens)
        device_rows = torch.from_numpy(rows.astype(np.int64)).to(self._device, non_blocking=True)
        self._tokens[device_rows, torch.from_numpy(lens).to(self._device, non_blocking=True)] = token_ids.int()
        if self._device.type == "cpu":
            self._rows.num_known[rows] = lens + 1
        found = {}
        for nth, place in enumerate(wanted.tolist()):
            assert raw is not None
            width = int(self._sampling.logprobs[rows[place]])
            found[int(places[place])] = logprobs.columns(raw[nth : nth + 1], token_ids[place : place + 1], width)
        return token_ids.int(), found

    def _prompt_logprobs(self, arrays: StepArrays, hidden: Tensor) -> dict[int, LogprobColumns]:
        """For rows that want them: the prompt tokens that follow the positions of this step."""
        found = {}
        wanted = self._sampling.prompt_logprobs[arrays.rows]
        for place in np.flatnonzero(wanted >= 0).tolist():
            row, start, count = int(arrays.rows[place]), int(arrays.starts[place]), int(arrays.counts[place])
            last = min(start + count, int(self._rows.num_prompt[row]) - 1)
            if last <= start:
                continue
            begin = int(arrays.query_start[place])
            states, width = hidden[begin : begin + last - start], int(wanted[place])
            following = self._tokens[row, start + 1 : last + 1].long()
            packed = logprobs.in_chunks(states, following, width, self._model.logits)
            found[place] = logprobs.unpack(packed.cpu().numpy(), width)
        return found


def _device(resolved: Resolved, placement: WorkerPlacement) -> torch.device:
    if resolved.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ProcessFatal("--device cuda: torch sees no GPU (driver, or a CPU build of torch)")
    return placement.take_gpu()
