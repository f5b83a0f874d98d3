"""The engine: persistent rows, a step's inputs, model, output. CPU and GPU alike; nothing waits for the device.

A step: its columns and what changes in the rows go to the device, then a CUDA graph of the padded batch size is replayed (inputs,
model, sampling), or the same is launched one by one (compute.py). Sampled tokens are written behind their rows on the device, where
the next step finds them, and go to the host behind a mark (pending.py). A device's kernels are injected. Of one thread.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.edges.control import GraphCounts
from meshlm.protocol.edges.step import NO_LIMIT, StepPlan, StepResult
from meshlm.protocol.pool import PoolKind
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers import memory
from meshlm.workers.attention.backend import Backend
from meshlm.workers.batch import LayerCache
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.lockstep import StepExchange
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.engine import NOT_ASKED, NOT_BALANCED, EngineFacts, ProgressReport
from meshlm.workers.engine.compute import Compute
from meshlm.workers.engine.extra_kinds import kinds_of
from meshlm.workers.engine.kit import TorchInputs, TorchKit
from meshlm.workers.engine.kv_scales import scales_of
from meshlm.workers.engine.pending import Outcome, PendingStep, timeline_of
from meshlm.workers.engine.sleeper import Sleeper
from meshlm.workers.engine.together import EAGER, StepExecution, Together, reads_across
from meshlm.workers.graphs.keys import MIXED_TOKENS, Key
from meshlm.workers.kv.pages import KVPages
from meshlm.workers.kv.tensor_pages import pages_of
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.models.registry import choose_layer_executor
from meshlm.workers.moe.placement.balancer import Balancer, Experts
from meshlm.workers.nvtx import mark_layers
from meshlm.workers.rows.changes import NOTHING
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.extras.extra import RowExtras, StepExtra
from meshlm.workers.rows.step_columns import StepColumns, columns_of
from meshlm.workers.states.drafted import DraftStates
from meshlm.workers.weights import reload
from meshlm.workers.weights.load import DTYPES, load_model, weight_bytes
from meshlm.workers.weights.weights_plan import WeightsPlan, weights_plan

MB = 1 << 20


class ModelEngine:
    def __init__(
        self, config: MeshConfig, device: torch.device, backend: Backend, kit: TorchKit, report: ProgressReport,
        placement: WorkerPlacement | None = None,
    ) -> None:  # fmt: skip
        resolved = config.require_resolved()
        placement = placement or WorkerPlacement()
        self.config, self.resolved, self.device, self.shard = config, resolved, device, placement.shard
        self.spec = placement.shard.local(resolved.spec)
        self._is_first, self._is_last = placement.shard.is_first, placement.shard.is_last
        self._others = memory.taken_by_others() if device.type == "cuda" else 0
        self.dtype = DTYPES[resolved.dtype]
        self._cache_dtype = memory.cache_dtype(
            config.cache.kv_cache_dtype, self.dtype, device, backend, latent=self.spec.mla is not None
        )

        self.layout = memory.layout_of(config, placement.shard, self._cache_dtype, self.dtype)
        memory.check_known(config, self.layout)

        def progress(done: int, total: int) -> None:
            report("weights", done // MB, total // MB, "MB")

        self.weights_plan = weights_plan(config, device, self._others, placement.shard, self._cache_dtype)
        seed, exact = config.model.seed or 0, config.worker.deterministic
        self.model = load_model(
            resolved, device, seed, progress, placement.shard, self.weights_plan, deterministic=exact
        )
        self.draft_plan: WeightsPlan | None = None
        self.draft_model = self._load_drafter(progress)
        for model in self.models:
            choose_layer_executor(model, config.worker, backend.name, self.dtype)
        if config.worker.profile_layers:
            mark_layers(self.model, torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
        tokens, hidden = max(resolved.max_num_batched_tokens + 2, MIXED_TOKENS[0]), resolved.spec.hidden_size
        self.most_tokens = tokens  # of a step, padded
        self.comm = placement.connect(device, self.dtype, tokens, hidden)
        for model in self.models:
            model.join(self.comm)
        self.together = Together(placement.experts(device), config.experts) if config.lockstep else None
        self.balancer: Balancer | None = None
        if self.together is not None:
            self.balancer = self._make_balancer(self.together.experts)
            slots = self.balancer is not None
            if config.experts.all2all_backend == "peer_memory":
                self.together.experts.share_memory(tokens, resolved.spec, self.dtype)
            self.model.share_experts(self.together.experts, config.experts.all2all_backend, slots=slots)
        elif config.experts.enable_eplb and self.model.mixtures():  # between tensor-parallel ranks, which end together
            self.balancer = self._make_balancer(placement.stage(device))
            self.model.use_slots()
        # pipelines: where the stage before writes, and what the next one takes
        self.intermediate_tensors = torch.empty(0)
        if not (self.shard.is_first and self.shard.is_last):
            self.intermediate_tensors = torch.zeros(tokens, hidden, dtype=self.dtype, device=device)
        rows, samples = resolved.max_num_seqs, self.shard.is_last
        self._kv_scales = scales_of(self)
        specs, shares, self._block_size = self.layout.specs, self.layout.shares, self.layout.block_size
        self.rows = DeviceRows(
            rows, resolved.max_model_len, self._block_size, device, len(specs), shares, kit.draft_lines(config)
        )
        self.inputs = kit.inputs(self.rows, samples=samples)
        self.head = kit.head(self.model, self.rows, self.dtype, samples=samples)
        self.compute = Compute(
            self.model, backend, self._block_size, self.shard, self.inputs, self.head, self.intermediate_tensors
        )  # fmt: skip
        self.compute.turns = None if self.together is None else self.together.turns
        self.pages: KVPages | None = None
        self.verification = kit.verification(self)
        self.extras = self.rows.table.extras = RowExtras(kinds_of(self, tokens), self.rows.table.num_rows)
        self.graphs, self.captures = kit.graphs(self)
        self._timeline = timeline_of(device, self.rows)
        kit.compile_ahead(self, report)
        count, lines = self._num_pages(report)
        self._make_draft_states(count, lines)
        report("KV cache", count, count, "blocks")
        kit.warm_up(self)
        self._capture(report)
        if self.shard.size > 1 and self.together is None and self.balancer is not None:
            self.balancer.begin()
        self._sleeper = Sleeper(self)
        self._last = self._timeline.mark()
        gib = sum(map(weight_bytes, self.models)) / 2**30
        held = self.layout.tokens_held(count, resolved.max_model_len)
        cache = "none, an encoder needs none" if self.spec.encoder_only else f"{held} tokens"
        shown = {"weights": f"{gib:.2f} GiB", "KV cache": cache}
        if self.layout.states or self.spec.audio_encoder is not None:
            shown["KV blocks"] = f"{self._block_size} tokens, {self.layout.waste:.1%} of their bytes unused"
        facts = EngineFacts(count, self._block_size, rows, resolved.spec.vocab_size, shown)
        drafts = self.config.speculative.num_speculative_tokens
        facts = replace(facts, max_drafts=drafts, max_draft_lines=lines or self.rows.max_lines - rows or NO_LIMIT)
        facts = replace(facts, pool_kinds=tuple(PoolKind), pooled_bytes=4 * self._pooled_size(), kv_specs=specs)
        self.facts = replace(facts, attention_wave=kit.attention_wave(self), kv_heads=self.layout.heads)

    def _capture(self, report: ProgressReport) -> None:
        if self.together is not None:  # its graphs are captured when it has met the other ranks (join)
            return
        if self.shard.size > 1:  # a capture in idle time would meet the other ranks in the middle of a step
            self.captures.all(report)
        else:
            self.captures.first(report, everything=self.config.worker.cudagraph_capture == "start")

    @property
    def models(self) -> list[Decoder]:
        """The model, and the one that drafts for it, if any does."""
        return [self.model] if self.draft_model is None else [self.model, self.draft_model]

    def be_without(self, tags: tuple[str, ...]) -> None:
        self._sleeper.be_without(tags)

    def capture_again(self) -> None:
        """The CUDA graphs that were forgotten in a sleep, as at the start; what they write is padding."""
        self._capture(lambda *progress: None)

    def _pooled_size(self) -> int:
        head, pooling = self.resolved.spec.head, self.resolved.pooling
        if self.resolved.spec.lexical == "splade":
            return self.resolved.spec.vocab_size
        others = [0 if head is None else head.num_labels, *(one.outputs for one in (pooling.dense if pooling else ()))]
        return max(self.resolved.spec.hidden_size, *others)

    def _load_drafter(self, progress: Callable[[int, int], None]) -> Decoder | None:
        """Loads the model that drafts, where there is one."""
        if (resolved := self.resolved.drafter) is None:
            return None
        config = replace(self.config, resolved=resolved)
        self.draft_plan = weights_plan(config, self.device, self._others, self.shard, self._cache_dtype)
        return load_model(resolved, self.device, config.model.seed or 0, progress, self.shard, self.draft_plan)

    def _make_balancer(self, group: ExpertGroup) -> Balancer | None:
        """Makes the balancer of experts that move between ranks (--enable-eplb)."""
        experts, mixtures = self.config.experts, self.model.mixtures()
        if not experts.enable_eplb or not mixtures:
            return None
        moe, seed = mixtures[0].moe, self.config.model.seed or 0
        balancer = Balancer(
            experts.eplb,
            group,
            Experts.of(moe, self.shard, group),
            [list(mixture.experts.parameters()) for mixture in mixtures],
            lambda: reload.load_experts(self, seed),
            same_rows=self.together is None,
        )
        for mixture, replicas in zip(mixtures, balancer.replicas, strict=True):
            mixture.replicas = replicas
        return balancer

    # --- memory ---

    def _make_draft_states(self, count: int, lines: int) -> None:
        """The KV cache of `count` pages, and behind them those for the states of so many lines of requests with drafts."""
        groups, moved = self.layout.state_groups, self.config.kv_transfer
        all_pages = count + lines * len(groups)
        tensors, shared = memory.kv_tensors(self.layout, all_pages, self.device, shared=moved.shares_pages)
        self.compute.caches = memory.make_caches(self.layout, all_pages, self.device, self._kv_scales, tensors)
        if moved.moves and count:
            self.pages = pages_of(tensors, count, shared, shares=moved.shares_pages)
        if lines:
            assert isinstance(self.inputs, TorchInputs)
            self.inputs.draft_states = DraftStates(self.compute, self.rows, groups, count, lines)

    def _num_pages(self, report: ProgressReport) -> tuple[int, int]:
        """Pages, and lines of requests with drafts that have states."""
        if self.spec.encoder_only:
            self._full_step(self.make_caches(0))  # what does not fit is known before the first request
            return 0, 0
        wanted = memory.known_bytes(self.config)
        if wanted is None and self.device.type != "cuda":
            raise ProcessFatal(
                f"--device {self.resolved.device}: it does not say how much KV cache it has; --kv-cache-memory"
            )
        if wanted is None:
            report("memory profile", 0, 1, "")
            share = self.config.cache.gpu_memory_utilization
            wanted = memory.profile(share, self._others, lambda: self.make_caches(1), self._full_step)
        lines = memory.draft_lines(self.config, wanted, self.layout)
        return memory.num_pages(self.config, wanted, self.layout), lines

    def make_caches(self, count: int) -> list[LayerCache]:
        return memory.make_caches(self.layout, count, self.device, self._kv_scales)

    def _full_step(self, caches: list[LayerCache]) -> None:
        self.compute.caches = caches
        with torch.inference_mode():
            for extra in self.extras.for_largest_step():
                extra.before_model()
        self.dummy_step(self.full_counts())
        if self.shard.is_last:
            self.head.warm_up()
        self.compute.caches = []

    def full_counts(self) -> list[int]:
        """Lengths of the prompts of a step that is as large as steps get."""
        return memory.full_step(self.resolved.max_num_batched_tokens, self.resolved.max_model_len)

    def dummy_step(self, counts: list[int], start: int = 0) -> None:
        """Prompts of the dummy row that begin at `start`: reads and writes block 0, which must hold nothing yet."""
        n = min(len(counts), self.rows.max_rows)
        step = columns_of(
            np.full(n, self.rows.max_rows, np.int32), np.full(n, start, np.int32), np.array(counts[:n], np.int32)
        )
        with torch.inference_mode():  # as steps run: a compiler takes other tensors for another case
            self.inputs.send(step, n, NOTHING, 0, np.arange(n))
            self.compute.eager(step)
            if self.rows.has_adapters:
                step.adapted = True
                self.compute.eager(step)

    def check_weights(self, resolved: Resolved) -> str:
        return reload.why_not(self, resolved)

    def load_weights(self, resolved: Resolved) -> None:
        reload.load(self, resolved)

    def sum_weights(self) -> str:
        return reload.sum_of(self.models)

    # --- steps ---

    def reset(self) -> None:
        self.rows.reset()
        if self.verification is not None:
            self.verification.reset()

    def idle(self) -> bool:
        """Capture a graph, unless steps are on their way."""
        self.extras.in_idle_time()
        if self.graphs.complete or self.shard.size > 1 or self.together is not None:
            return False
        if self._last.query():
            self.captures.in_idle_time()
        return True

    def rebalance(self) -> str:
        if self.balancer is None:
            return NOT_BALANCED
        if self.together is None:  # they agree on nothing but the order of their steps
            return NOT_ASKED
        self.balancer.asked = True
        return ""

    def graph_counts(self) -> GraphCounts:
        whole, halved = ({}, {}) if self.together is None else (dict(self.together.whole), dict(self.together.halved))
        loads = self.balancer.loads if self.balancer is not None else ()
        counts = GraphCounts(whole=whole, halved=halved, expert_loads=loads)
        if self.device.type == "cpu":
            return counts
        return replace(counts, replays=dict(self.graphs.replays), misses=dict(self.graphs.misses))

    def join(self, exchange: StepExchange | None) -> None:
        """See `LockstepEngine`. CUDA graphs hold the communicator of the experts: those of an earlier group are gone."""
        if self.together is None:
            return
        self.together.leave()  # the device waits for nobody
        self.graphs.forget()
        with torch.inference_mode():
            self.together.join(exchange)
            if exchange is not None:
                if self.balancer is not None:
                    self.balancer.begin()
                self.captures.together(everything=self.config.worker.cudagraph_capture == "start")

    def step(self, plan: StepPlan, received_ns: int) -> PendingStep:
        with torch.inference_mode(), ExitStack() as unless_done:
            if self.together is not None:
                unless_done.callback(self.together.leave)
            pending = self._step(plan, received_ns)
            unless_done.pop_all()
            return pending

    def _execution(self, step: StepColumns, plan: StepPlan, extras: list[StepExtra[Tensor]]) -> StepExecution:
        """How the step is taken; of ranks that step together all take it the same way."""
        why_no_graph = "" if self.graphs.keys else "off"
        for extra in extras:
            why_no_graph = extra.why_no_graph or why_no_graph
        if why_no_graph:
            self.graphs.misses[why_no_graph] += 1
        if self.together is not None:
            across = reads_across(plan) or any(extra.reads_across for extra in extras)
            asked = self.balancer is not None and self.balancer.asked
            graph = not why_no_graph
            return self.together.execution(step, self.graphs, graph=graph, across=across, rebalance=asked)
        if why_no_graph:
            return EAGER
        seen = step.contexts() if self.graphs.asks_for_contexts(step.n, uniform=step.uniform) else None
        key = self.graphs.find(
            step.t, step.n, uniform=step.uniform, contexts=seen, num_prompts=step.num_prompts,
            shared=step.shared is not None, drafts=step.shows_drafts, adapters=step.adapted,
        )  # fmt: skip
        if key is not None and not key.shared:
            step.shared = None
        return StepExecution(key)

    def _step(self, plan: StepPlan, received_ns: int) -> PendingStep:
        begun_ns = time.monotonic_ns()
        changes, segments = self.rows.changes(plan)
        step = self.rows.step(plan)
        if self.verification is not None:
            step, changes, segments = self.verification.draft(step, plan, changes, segments)
        places, extras = step.places, self.extras.for_step(step) if self.extras.num_rows else []
        key, cut, rebalance = self._execution(step, plan, extras)
        graphs = key.graphs(pause=any(extra.needs_pause for extra in extras)) if key is not None else ()
        if self.balancer is not None:
            self.balancer.before_step(asked=rebalance)
        self.inputs.send(step, step.n if key is None else key.requests, changes, segments, places)
        if self.verification is not None:
            self.verification.place(step, key)
        if not self._is_first:
            self.comm.receive(self.intermediate_tensors[: step.t])
        for each in graphs:
            self.graphs.prepare(each)  # before `begin`: the host's time for it says nothing about the step
        begin = self._timeline.mark()
        for extra in extras:
            extra.before_model()
        hidden: Tensor | None = None
        if key is not None:
            self._replay(graphs, extras)
        elif step.n:
            hidden = self.compute.eager(step, cut, extras)
            for extra in extras:
                extra.after_model(hidden)
        else:
            self.compute.idle()  # of ranks that step together
        if not self._is_last:
            self.comm.send(self.intermediate_tensors[: step.t])
        chooses = self._is_last and len(places) > 0
        if chooses:
            self.head.sample_rest(step)
        sampled = self.head.sampled[: step.num_lines]
        if self.verification is None:
            outcome = Outcome(self._timeline.fetch(sampled))
        else:
            outcome = self.verification.accept(step, sampled, hidden if self._is_last else None, self._timeline)
        details = self.head.logprobs(step, outcome.counts) if chooses else []
        before, self._last = self._last, self._timeline.mark()
        for extra in extras:
            extra.after_head(outcome.tokens, self._last, outcome.counts)
        launched_ns = self._timeline.launched_ns(begun_ns)
        result = StepResult(plan.session, plan.step, b"", received_ns=received_ns, launched_ns=launched_ns)
        return PendingStep(result, outcome, step, details, extras, (before, begin, self._last))

    def _replay(self, graphs: Sequence[Key], extras: list[StepExtra[Tensor]]) -> None:
        """The step's graph; or the model's, beside which the host does something for its extras, and the head's."""
        self.graphs.replay(graphs[0])
        for head in graphs[1:]:
            for extra in extras:
                extra.before_head(self.head)
            self.graphs.replay(head)
