"""What a GPU with Triton brings to the engine: kernels for inputs and output, CUDA graphs, and a start that compiles all of them."""

import gc
import math
from collections.abc import Callable

import numpy as np
import structlog
import torch

from meshlm.kernels.attention import tiles
from meshlm.kernels.attention.self_test import CacheShape, self_test_cache, self_test_hopper
from meshlm.kernels.gate_up_silu import kernel as gate_up_silu
from meshlm.kernels.lora import kernel as lora
from meshlm.kernels.lora.self_test import results as results_of_adapters
from meshlm.kernels.mla import tiles as latent_tiles
from meshlm.kernels.pdl import multiprocessors
from meshlm.kernels.precompile import precompiled
from meshlm.kernels.self_test import why_wrong
from meshlm.kernels.small_m_gemm import kernel as small_m_gemm
from meshlm.kernels.states import MOST_PROMPTS
from meshlm.kernels.tuning.core import Setting
from meshlm.kernels.tuning.products import ProductBench
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.attention.triton_backend import states_in_graphs
from meshlm.workers.batch import StepInputs
from meshlm.workers.cuda import tuning
from meshlm.workers.cuda.tuning import Ranks, Tuner
from meshlm.workers.engine import ProgressReport
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.graph_steps import PaddedStep, TimedSteps
from meshlm.workers.engine.kit import TorchKit
from meshlm.workers.engine.state_self_test import self_test_model
from meshlm.workers.engine.triton_inputs import Staging, TritonInputs
from meshlm.workers.graphs.dispatcher import Captures, Dispatcher, Recorder
from meshlm.workers.graphs.keys import (
    LONG_CONTEXT,
    SHORT,
    Key,
    graph_keys,
    graphs_to_warm_up,
    keys_of_adapters,
    keys_of_drafts,
    long_requests,
    long_to_warm_up,
    mode_of,
    of_model,
    shared_to_warm_up,
    steps_to_warm_up,
)
from meshlm.workers.graphs.replays import Replays
from meshlm.workers.models.counts import active_parameters, warm_rows
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.output.logits_sampler import LINES, LogitsSampler
from meshlm.workers.rows.changes import NOTHING
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.shared_prefixes import PrefixTables
from meshlm.workers.rows.step_columns import StepColumns, columns_of
from meshlm.workers.speculative.device_drafters import device_drafter_of
from meshlm.workers.speculative.device_verification import DeviceVerification, device_lines
from meshlm.workers.states.torch_states import WrongStates

_log = structlog.get_logger()


class TritonKit(TorchKit):
    _verification: DeviceVerification | None = None

    def draft_lines(self, config: MeshConfig) -> int:
        return device_lines(config.require_resolved().max_num_seqs, config.speculative.num_speculative_tokens)

    def inputs(self, rows: DeviceRows, *, samples: bool) -> TritonInputs:
        self._inputs = TritonInputs(rows, Staging(), rows.state.device, samples=samples)
        return self._inputs

    def head(self, model: Decoder, rows: DeviceRows, dtype: torch.dtype, *, samples: bool) -> LogitsSampler:
        self._head = LogitsSampler(model, rows, dtype, rows.state.device, LINES if samples else 0)
        return self._head

    def verification(self, engine: ModelEngine) -> DeviceVerification | None:
        config = engine.config.speculative
        if config.method:
            alone = engine.shard.size == 1 and engine.config.worker.cudagraph_mode != "NONE"
            replays = Replays(Recorder() if alone and not engine.config.worker.enforce_eager else None)
            drafter = device_drafter_of(engine, self._inputs, self._head, replays)
            self._verification = DeviceVerification(config, drafter, engine.rows, self._inputs)
        return self._verification

    def graphs(self, engine: ModelEngine) -> tuple[Dispatcher, Captures]:
        worker, resolved = engine.config.worker, engine.resolved
        state = engine.spec.state
        mode, why = mode_of(worker, lambda: self._why_no_prompts(engine))
        if why:
            _log.info("CUDA graphs", mode=mode, asked=worker.cudagraph_mode, reason=why)
        parameters = active_parameters(engine.model)
        rows, tokens = resolved.max_num_seqs, resolved.max_num_batched_tokens
        together = engine.together is not None
        keys = graph_keys(
            mode, rows, tokens, worker.cudagraph_capture_sizes, parameters,
            most_tokens=worker.max_cudagraph_capture_size, together=together, states=state is not None,
        )  # fmt: skip
        if not together:
            keys += _short_decodes(engine, keys)
        if self._verification is not None and any(key.uniform for key in keys):
            keys += keys_of_drafts(engine.rows.max_lines)
        if engine.rows.has_adapters:
            keys += keys_of_adapters(keys)
        if engine.together is not None:
            keys += [
                key._replace(halves=True) for key in keys if engine.together.may_halve(key.tokens, uniform=key.uniform)
            ]
        engine.rows.prefixes = self.shared_prefixes(engine)
        self._padded = PaddedStep(engine.compute, engine.shard, self._inputs, self._head)
        size = engine.shard.tp_size

        def on_all_ranks(worked: bool) -> bool:
            votes = torch.full((8,), float(worked), dtype=engine.dtype, device=engine.device)
            return int(engine.comm.all_reduce(votes)[0].item()) == size

        agree: Callable[[bool], bool] | None = on_all_ranks if size > 1 else None
        if engine.together is not None:
            agree = engine.together.vote
        if state is None:
            step_time = of_model(engine.spec, parameters, engine.layout.dtype.itemsize)
            long = _long_requests(engine)
            graphs = Dispatcher(keys, self._padded, agree, step_time, long=long, short_context=tiles.SHORT_CONTEXT)
        else:  # few layers attend, so contexts make no step much longer, and launching one takes the host very long
            graphs = Dispatcher(keys, self._padded, agree, most_prompts=MOST_PROMPTS, short_context=tiles.SHORT_CONTEXT)
        return graphs, Captures(graphs, self._inputs.clear)

    def _why_no_prompts(self, engine: ModelEngine) -> str:
        """Why graphs must hold decodes alone; "" where they may hold prompts too. The same on all ranks of a group."""
        state = engine.spec.state
        if state is None:
            return ""
        if engine.together is not None:
            return "prompts of a model with recurrent states are launched kernel by kernel where ranks step together"
        reason = states_in_graphs(state, engine.rows.block_size, engine.dtype, engine.device)
        if engine.shard.tp_size == 1:
            return reason
        votes = engine.comm.all_reduce(torch.full((8,), float(not reason), dtype=engine.dtype, device=engine.device))
        return reason if int(votes[0].item()) == engine.shard.tp_size else reason or "another rank has found them wrong"

    def _self_test_attention(self, engine: ModelEngine, *, launched: bool) -> None:
        """Hopper's attention is used for this model's layers where it gives, on this GPU, what the other kernel gives."""
        spec = engine.spec
        if spec.mla is not None or spec.encoder_only:
            return
        if engine.layout.dtype != engine.dtype:  # an FP8 cache is read by the other kernel
            return
        cap = spec.attn_logit_softcapping
        for kv_heads, dim, windowed in _attention_kinds(spec):
            if tiles.hopper_from(dim, spec.sliding_window if windowed else 0) == math.inf:
                continue
            shape = (spec.num_attention_heads, kv_heads, dim, engine.layout.block_size)
            variant = tiles.Variant(*shape, engine.dtype, windowed, cap > 0, spec.attention_sinks)
            if reason := self_test_hopper(variant, engine.device, cap, launched=launched):
                _log.warning("attention of prompts runs without Hopper's kernel", reason=reason, windows=windowed)

    def product_rows(self, engine: ModelEngine) -> set[int]:
        """So many tokens meet every variant of the kernels of plain products."""
        found = small_m_gemm.warm_rows() | gate_up_silu.warm_rows()
        return found | lora.warm_rows() if engine.rows.has_adapters else found

    def shared_prefixes(self, engine: ModelEngine) -> PrefixTables | None:
        return _shared_prefixes(engine)

    def attention_wave(self, engine: ModelEngine) -> int:
        """The wave of Hopper's kernel; other kernels' tiles are small."""
        spec = engine.spec
        if spec.mla is not None or spec.encoder_only or engine.layout.dtype != engine.dtype:
            return 0
        kinds = [(kv_heads, dim) for kv_heads, dim, windowed in _attention_kinds(spec) if not windowed]
        if not kinds or any(tiles.hopper_from(dim) == math.inf for _, dim in kinds):
            return 0
        return min(tiles.hopper_wave(spec.num_attention_heads, kv_heads, engine.device) for kv_heads, _ in kinds)

    def compile_ahead(self, engine: ModelEngine, report: ProgressReport) -> None:
        """Have the kernels of all dummy steps, none of which waits for them. What torch itself computes here is nonsense.

        Every rank of a group does so, whether its kernels are cached or not: there are collectives in these steps."""
        if engine.model.executor is not None:  # torch's compiler launches its own kernels
            return
        tuner = self._tuner(engine)
        tuner.use_kept()
        self._compile(engine, report)
        setting = Setting(engine.device, engine.dtype, engine.resolved.max_num_batched_tokens)
        if tuner.measure(ProductBench(setting._replace(full=engine.config.worker.tune == "full")), report):
            gc.collect()
            torch.cuda.empty_cache()  # the memory profile counts what is reserved
            self._compile(engine, report)

    def _tuner(self, engine: ModelEngine) -> Tuner:
        shard, mode = engine.shard, engine.config.worker.tune
        ranks = Ranks(shard, engine.comm, engine.device, engine.dtype, engine.spec.hidden_size)
        return Tuner(mode, tuning.store_of(engine.config) if ranks.first and mode != "off" else None, ranks)

    def _compile(self, engine: ModelEngine, report: ProgressReport) -> None:
        caches = engine.make_caches(1)
        try:
            with engine.model.shortened() as layers, precompiled(lambda done, of: report("kernels", done, of, "")):
                engine.compute.caches = caches[:layers]
                self._self_test_attention(engine, launched=False)
                engine.dummy_step(engine.full_counts())
                self._warm_up(engine)
        except torch.OutOfMemoryError:  # the memory profile says it better
            if engine.shard.size > 1:  # the others are in the middle of a step
                raise
        finally:
            engine.compute.caches = []

    def _self_test_states(self, engine: ModelEngine) -> None:
        """WrongStates where a model with recurrent states is not what plain torch makes of it. All ranks of a group say so together."""

        def inputs(step: StepColumns) -> StepInputs:
            self._inputs.send(step, step.n, NOTHING, 0, np.arange(step.n))
            return self._inputs.of_step(step)

        reason = self_test_model(engine, engine.compute.attention, inputs)
        self._inputs.clear()
        votes = torch.full((8,), float(not reason), dtype=engine.dtype, device=engine.device)
        if engine.shard.tp_size > 1:
            votes = engine.comm.all_reduce(votes)
        if int(votes[0].item()) < engine.shard.tp_size:
            raise WrongStates(reason or "another rank's part of the model is not right")

    def _self_test_cache(self, engine: ModelEngine) -> None:
        """ProcessFatal where the kernels cannot keep what --kv-cache-dtype fp8_e5m2 asks for."""
        if engine.layout.dtype != torch.float8_e5m2:
            return
        spec, page = engine.spec, engine.config.cache.block_size
        for kv_heads, dim, _ in _attention_kinds(spec):
            shape = CacheShape(spec.num_attention_heads, kv_heads, dim, page, engine.layout.dtype)
            if reason := self_test_cache(shape, engine.dtype, engine.device):
                raise ProcessFatal(f"--kv-cache-dtype fp8_e5m2: on this GPU {reason}; use fp8 or auto")

    def _self_test_adapters(self, engine: ModelEngine) -> None:
        """ProcessFatal where the kernels of adapters do not add to this model's layers what they must."""
        if (slots := self._inputs.adapters) is None:
            return
        like = torch.empty(0, dtype=engine.dtype, device=engine.device)
        if reason := why_wrong(results_of_adapters(slots.shapes, slots.max_rank, like)):
            raise ProcessFatal(f"--enable-lora: on this GPU {reason}; leave it out")

    def warm_up(self, engine: ModelEngine) -> None:
        """Every kernel is compiled here, in each variant that steps use."""
        self._self_test_cache(engine)
        self._self_test_attention(engine, launched=True)
        self._self_test_adapters(engine)
        self._warm_up(engine)
        if self._verification is not None:
            with torch.inference_mode():
                self._verification.drafter.warm_up(engine.full_counts())
        if engine.spec.state is not None:
            self._self_test_states(engine)
        if engine.config.worker.tune == "full" and engine.shard.size == 1 and engine.model.executor is None:
            timed = TimedSteps(engine, self._inputs, self._padded)
            if self._tuner(engine).measure_steps(timed):
                self._warm_up(engine)

    def _warm_up(self, engine: ModelEngine) -> None:
        rows, resolved = engine.rows, engine.resolved
        longest = rows.block_tables.shape[-1] * rows.block_size
        most = rows.max_rows
        spec = engine.spec
        if spec.mla is None:
            kinds = {kind[:2] for kind in _attention_kinds(spec)}
            encoder = [] if spec.audio_encoder is None else [spec.audio_encoder.max_source_positions]
            some = (
                tiles.warm_sizes(kv_heads, most, context, engine.device, spec.num_attention_heads // kv_heads, dim)
                for kv_heads, dim in sorted(kinds)
                for context in (longest, *encoder)
            )
            decodes = sorted({1, most}.union(*some))
        else:
            decodes = latent_tiles.warm_sizes(spec.num_attention_heads, most, engine.device)
        tokens = resolved.max_num_batched_tokens
        prompt = min(tokens, resolved.max_model_len)
        sizes = self.product_rows(engine) | warm_rows(engine.model, tokens)
        for counts in steps_to_warm_up(decodes, sizes, most, prompt, tokens):
            engine.dummy_step(counts)
        if spec.mla is not None and prompt > 1:  # the rest of a prompt, of which earlier steps have computed some
            engine.dummy_step([prompt - 1], start=1)
        self._inputs.clear()
        with torch.inference_mode():
            for adapters in (False, True):
                keys = [key for key in engine.graphs.keys if key.adapters == adapters]
                for key in graphs_to_warm_up(keys, sizes, min(tokens, most * prompt)):
                    self._padded(key)
            for key in long_to_warm_up(engine.graphs.keys, _long_requests(engine)):
                self._padded(key)
            if rows.prefixes is not None:
                full = [(spec.num_attention_heads, kv_heads, dim) for kv_heads, dim in _full_attention(spec)]
                numbers = tiles.warm_shared(rows.prefixes.sizes, full, most, longest, engine.device)
                for key in shared_to_warm_up(engine.graphs.keys, numbers, most):
                    self._padded(key)
            for key in _steps_with_drafts(engine, self._inputs):
                self._padded(key)
            if engine.shard.is_last:
                self._head.one_line()
                self._head.warm_up_masks()
        if self._verification is not None:
            self._verification.warm_up()
        empty = np.array([0, 0, 1, 0], np.int32)  # one segment: the first token of row 0
        self._inputs.send(columns_of(*(np.zeros(1, np.int32) for _ in range(3))), 1, empty, 1, np.arange(0))
        torch.cuda.synchronize()


def _attention_kinds(spec: ModelSpec) -> list[tuple[int, int, bool]]:
    """Key-value heads of layers that attend, their size, and whether they have a window: each kind once, in the order of layers."""
    found = ((one.num_key_value_heads, one.head_dim, one.sliding_window > 0) for one in spec.attentions)
    return list(dict.fromkeys(found))


def _steps_with_drafts(engine: ModelEngine, inputs: TritonInputs) -> list[Key]:
    """Steps that verify so many tokens that attention has each tile that it may have for them; none where nobody drafts."""
    spec, rows, device = engine.spec, engine.rows, engine.device
    if inputs.verified is None:
        return []
    if spec.mla is not None:
        numbers = latent_tiles.warm_verified(inputs.queries, spec.num_attention_heads, rows.max_lines, device)
    else:
        kinds = [(spec.num_attention_heads, kv_heads, dim) for kv_heads, dim, _ in _attention_kinds(spec)]
        longest = rows.block_tables.shape[-1] * rows.block_size
        numbers = tiles.warm_verified(inputs.queries, kinds, rows.max_lines, longest, device)
    return [Key(number, number, drafts=True) for number in numbers]


def _short_decodes(engine: ModelEngine, keys: list[Key]) -> list[Key]:
    """Graphs of decodes whose attention has other tiles where contexts are short than where they are as long as they may be."""
    spec, longest = engine.spec, engine.rows.block_tables.shape[-1] * engine.rows.block_size
    if spec.mla is not None or longest <= tiles.SHORT_CONTEXT:
        return []
    kinds = [(kv_heads, spec.num_attention_heads // kv_heads, dim) for kv_heads, dim, _ in _attention_kinds(spec)]

    def differ(requests: int) -> bool:
        of_short, of_any = (
            [tiles.decode_tiles(requests * kv_heads, most, engine.device, group, dim) for kv_heads, group, dim in kinds]
            for most in (tiles.SHORT_CONTEXT, longest)
        )
        return of_short != of_any

    return [key._replace(contexts=SHORT) for key in keys if key.uniform and differ(key.requests)]


def _long_requests(engine: ModelEngine) -> list[int]:
    """The lengths of graphs for long contexts; none where it does not matter to a launch of attention how long these are."""
    spec, resolved = engine.spec, engine.resolved
    if resolved.max_model_len <= LONG_CONTEXT or engine.together is not None:
        return []
    chunked = any(one.attention_chunk_size for one in spec.attentions)
    splits = spec.mla is None and spec.state is None and not chunked and _full_attention(spec)
    return long_requests(resolved.max_num_seqs) if splits else []


def _full_attention(spec: ModelSpec) -> list[tuple[int, int]]:
    """Key-value heads and their size, of the layers whose queries may see all keys before them."""
    kinds = ((kv_heads, dim) for kv_heads, dim, windowed in _attention_kinds(spec) if not windowed)
    return list(dict.fromkeys(kinds))


def _shared_prefixes(engine: ModelEngine) -> PrefixTables | None:
    """Finds the prefixes that decodes share; None where no kernel reads them together, or ranks see other batches than others."""
    spec, rows = engine.spec, engine.rows
    if engine.config.worker.disable_cascade_attn or engine.together is not None or spec.mla is not None:
        return None
    if rows.max_rows < 2:
        return None
    groups = [group for group, kept in enumerate(engine.layout.specs) if kept.keeps_all and kept.shares_prefix]
    kinds = [(kv_heads, dim) for kv_heads, dim in _full_attention(spec) if dim <= tiles.LARGE_DIM]
    if not groups or not kinds:
        return None
    kv_heads, dim = min(kinds)
    sizes = tiles.shared_sizes(spec.num_attention_heads, kv_heads, multiprocessors(engine.device))
    token_bytes = 2 * kv_heads * dim * engine.layout.dtype.itemsize
    return None if sizes is None else PrefixTables(groups[0], rows.block_size, rows.max_rows, sizes, token_bytes)
