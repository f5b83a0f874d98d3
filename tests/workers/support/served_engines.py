"""Engines of models with random weights behind a scheduler: what no request needs is NaN, and tokens are held against transformers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers
import torch
from bench import COORDINATOR, DETOKENIZER, LIFE, Bench, Model, limits
from msgspec.structs import replace
from sharded_models import Threads, communicators, shards
from small_models import SMALL

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.edges.step import StepPlan, StepResult
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import Handle, RequestId
from meshlm.runtime.process.events import Received
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.distributed.communicator import Communicator
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine
from meshlm.workers.speculative.verification import Verification

BLOCK, LENGTH, STEP, WINDOW, OUTPUT = 8, 128, 32, 11, 24
PROMPTS = [[3 + (31 * n + 7 * i) % 200 for i in range(length)] for n, length in enumerate((70, 5, 41, 12, 23, 90))]
AGAIN = (10, 11)
STEP_NS = (
    10_000_000  # of every step: how many are on their way, and so what memory is left, hangs on how long one takes
)


class OneOfThreads(WorkerPlacement):
    """A rank whose peers are in other threads of this process."""

    def __init__(self, shard: Shard, comm: Communicator) -> None:
        super().__init__(shard)
        self._comm = comm

    def connect(self, device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> Communicator:
        return self._comm


class Engines(Model):
    """The engines of one scheduler, each in a thread; what no row of a step needs is NaN."""

    def __init__(
        self,
        folder: Path,
        num_pages: int,
        backend: str,
        tp: int = 1,
        pp: int = 1,
        speculative: SpeculativeConfig | None = None,
        make_alone: Callable[[MeshConfig], ModelEngine] | None = None,
        *,
        expert_parallel: bool = False,
        **flags_of_states: object,
    ) -> None:
        """make_alone: makes the engine of a rank that has no others; None: as for a mesh."""
        self._pool = ThreadPoolExecutor(tp * pp)
        values: dict[str, object] = {"model": str(folder), "device": "cpu", "dtype": "float32", "block_size": BLOCK}
        values |= {"max_model_len": LENGTH, "max_num_seqs": 8, "max_num_batched_tokens": STEP, "cpu_threads": 1}
        values |= {"attention_backend": backend, "kv_cache_memory": 1 << 30}
        config = resolve.resolve(flags.build(values | flags_of_states, None))
        config = replace(config, speculative=speculative or config.speculative)
        group = shards(tp, pp, expert_parallel=expert_parallel)
        threads, grad = torch.get_num_threads(), torch.is_grad_enabled()

        def make(shard: Shard, comm: Threads) -> ModelEngine:
            if make_alone is not None:
                return make_alone(config)
            placement = OneOfThreads(shard, comm) if shard.size > 1 else None
            return make_engine(config, lambda *progress: None, placement)

        self.engines = list(self._pool.map(make, group, communicators(group)))
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        for engine in self.engines:
            by_host = isinstance(engine.verification, Verification)
            engine._make_draft_states(num_pages, engine.facts.max_draft_lines if by_host else 0)
        facts = self.engines[0].facts
        super().__init__(num_pages, facts.block_size, pipeline=pp > 1, max_drafts=facts.max_drafts)
        self.kv_specs, self.max_draft_lines = facts.kv_specs, facts.max_draft_lines
        assert {engine.facts.kv_specs for engine in self.engines} == {self.kv_specs}
        self._tables: dict[int, list[int]] = {}
        self._starts: dict[int, int] = {}
        self.cached: dict[int, bytes] = {}  # pages that the mirror names

    def close(self) -> None:
        self._pool.shutdown()

    def reset(self) -> None:
        self._tables.clear()
        for engine in self.engines:
            engine.reset()

    def run(self, plan: StepPlan) -> StepResult:
        self._forget(plan)
        results: list[StepResult] = list(self._pool.map(lambda engine: engine.step(plan, 0).wait(), self.engines))
        assert len({result.token_ids for result in results[-self.engines[0].shard.tp_size :]}) == 1
        return replace(results[-1], gpu_ns=STEP_NS)

    def _forget(self, plan: StepPlan) -> None:
        """NaN into all pages but those that a row of this step or a later one can see, and those of cached prefixes."""
        width = len(self.kv_specs)
        for row in ints(plan.removed_rows):
            del self._tables[row]
        for new in plan.new_rows:
            self._tables[new.row] = ints(new.block_ids)
        for nth, row in enumerate(ints(plan.block_rows)):
            self._tables[row] += ints(plan.block_ids)[nth * width : (nth + 1) * width]
        self._starts.update(zip(ints(plan.rows), ints(plan.starts), strict=True))
        if isinstance(
            verification := self.engines[0].verification, Verification
        ):  # rows may be shorter than the plan can know
            for row in {*ints(plan.rows)} - {new.row for new in plan.new_rows}:
                self._starts[row] = min(self._starts[row], int(verification._num_known[row]) - 1)
        needed = set(self.cached)
        for row, table in self._tables.items():
            for group, spec in enumerate(self.kv_specs):
                needed.update(table[spec.first_needed(self.block_size, self._starts[row]) * width + group :: width])
        others = sorted(set(range(self.num_blocks)) - needed)
        for engine in self.engines:
            for cache in engine.compute.caches:
                if cache.keys.numel():
                    own = [page * engine.layout.shares[cache.group] for page in others]
                    cache.keys[own] = cache.values[own] = torch.nan
                if cache.cross is not None:
                    cache.cross.keys[others] = cache.cross.values[others] = torch.nan
                if cache.state is not None:
                    cache.state.ssm[:, others] = cache.state.conv[:, others] = torch.nan


class Reference:
    """transformers' model, and what was held against it."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self._right: dict[int, list[int]] = {}  # the greedy text of each prompt, once it is known

    def greedy(self, found: dict[int, list[int]]) -> dict[int, list[int]]:
        """The greedy text for each prompt, by handle, where what was found is that as far as it goes; else what it begins to differ by.

        One pass over prompt and text: if each token is the likeliest after those before it, the text is the greedy one.
        """
        assert all(len(tokens) == OUTPUT for tokens in found.values())
        return {handle: self._text(min(handle, len(PROMPTS) - 1), tokens) for handle, tokens in found.items()}

    def _text(self, nth: int, tokens: list[int]) -> list[int]:
        if tokens and self._right.get(nth) == tokens:
            return tokens
        prompt = PROMPTS[nth]
        with torch.no_grad():
            logits = self._theirs(torch.tensor([prompt + tokens[: OUTPUT - 1]])).logits[0, len(prompt) - 1 :]
        likeliest: list[int] = logits.argmax(-1).tolist()
        if likeliest == tokens:
            self._right[nth] = tokens
        return likeliest


def made(case: tuple[str, dict[str, Any]], folder: Path) -> Reference:
    """A folder with random weights, and transformers' model with them."""
    import transformers

    torch.manual_seed(0)
    name, extra = case
    config = getattr(transformers, name)(**{**SMALL, "initializer_range": 0.2, **extra})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    theirs.get_input_embeddings().weight.data *= 0.1  # what attention finds decides, not the last token
    theirs.save_pretrained(folder)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    return Reference(theirs)


def ask(bench: Bench, handle: int, prompt: list[int]) -> None:
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
    work = EngineRequest(RequestId(f"r{handle}"), Handle(handle), pack_i32(prompt), sampling, arrival_s=float(handle))
    bench.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))


def served(engines: Engines, stages: int = 1) -> Bench:
    """All prompts at once, in chunks, in too little memory; then the longest twice more, behind what it left itself."""
    bench = Bench(limits(max_model_len=LENGTH, max_num_batched_tokens=STEP, num_stages=stages), 0, 0, model=engines)
    engines.cached = bench.directory._hashes
    for nth, prompt in enumerate(PROMPTS):
        ask(bench, nth, prompt)
    bench.finish()
    for handle in AGAIN:
        ask(bench, handle, PROMPTS[-1])
        bench.finish()
    return bench
