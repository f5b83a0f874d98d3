"""How far the GPU engine's ways of computing one thing agree: graphs, chunks, batches, a warm prefix cache; and with float32.

    python -P benchmarks/agreement.py MODEL [--json FILE] [--prompts 16] [--tokens 48] [--kv-cache-dtype fp8]

Greedy tokens of each way against the eager reference (no graphs, whole prompts, one batch): which share of the sequences ever differs,
where first, and by how much the reference preferred its own token there. Then logits against transformers in float32 with the same
weights, beside transformers' own bfloat16. Dummy weights: their logits are nearly flat, so ties are far more frequent than in a real
model. --float32 0 leaves the second part out.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine import Engine
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine
from meshlm.workers.graphs.captures import Captures
from meshlm.workers.graphs.dispatcher import Dispatcher, graph_keys
from meshlm.workers.output.logits_sampler import LogitsSampler

MAX_LEN = 1024
CHUNK = 64
MOST_PROMPTS = 20


class Run(NamedTuple):
    """What one way of computing gave: tokens, and the logits [vocab] that each was chosen from."""

    tokens: list[list[int]]
    logits: list[list[Tensor]]


class Driver:
    """Steps an engine as a scheduler would. Row i has prompt i and blocks of its own, which outlive a run."""

    def __init__(self, engine: Engine, prompts: list[list[int]], logits: Callable[[int], Tensor | None]) -> None:
        self._engine, self._prompts, self._logits = engine, prompts, logits
        self._size = engine.facts.block_size
        self._steps = 0

    def run(self, num_tokens: int, *, chunk: int = MAX_LEN, warm: bool = False, rows: list[int] | None = None) -> Run:
        """num_tokens for each prompt; `chunk` tokens of a prompt at a time, beside decodes. warm: full blocks are there."""
        rows = list(range(len(self._prompts))) if rows is None else rows
        result = Run([[] for _ in self._prompts], [[] for _ in self._prompts])
        computed = {row: (len(self._prompts[row]) - 1) // self._size * self._size if warm else 0 for row in rows}
        fresh = set(rows)
        while any(len(result.tokens[row]) < num_tokens for row in rows):
            counts = {}
            for row in rows:
                if len(result.tokens[row]) < num_tokens:
                    known = len(self._prompts[row]) + len(result.tokens[row])
                    counts[row] = min(chunk, known - computed[row])
            self._step(counts, computed, fresh, result)
        return result

    def alone(self, num_tokens: int) -> Run:
        """One prompt after the other."""
        each = [self.run(num_tokens, rows=[row]) for row in range(len(self._prompts))]
        return Run([run.tokens[row] for row, run in enumerate(each)], [run.logits[row] for row, run in enumerate(each)])

    def _step(self, counts: dict[int, int], computed: dict[int, int], fresh: set[int], result: Run) -> None:
        order = sorted(counts, key=lambda row: counts[row] != 1)
        known = {row: len(self._prompts[row]) + len(result.tokens[row]) for row in order}
        sampling = [row for row in order if computed[row] + counts[row] == known[row]]
        self._steps += 1
        plan = StepPlan(
            1,
            StepId(self._steps),
            np.array(order, np.int32).tobytes(),
            np.array([computed[row] for row in order], np.int32).tobytes(),
            np.array([counts[row] for row in order], np.int32).tobytes(),
            b"" if len(sampling) == len(order) else bytes(row in sampling for row in order),
            sum(counts.values()),
            new_rows=[self._new(row) for row in order if row in fresh],
        )
        fresh.difference_update(counts)
        found = np.frombuffer(self._engine.step(plan, 0).wait().token_ids, np.int32).tolist()
        logits = self._logits(len(sampling))
        for place, (row, token) in enumerate(zip(sampling, found, strict=True)):
            result.tokens[row].append(token)
            if logits is not None:
                result.logits[row].append(logits[place])
        for row in order:
            computed[row] += counts[row]

    def _new(self, row: int) -> NewRow:
        prompt, blocks = self._prompts[row], MAX_LEN // self._size
        return NewRow(
            Row(row),
            np.array(prompt, np.int32).tobytes(),
            len(prompt),
            np.arange(row * blocks, (row + 1) * blocks, dtype=np.int32).tobytes(),
            SamplingParams(max_tokens=MAX_LEN, temperature=0.0),
        )


def compare(reference: Run, other: Run) -> dict[str, Any]:
    """First differences by sequence. `gap`: logit of the reference's token less that of the other's, by the reference."""
    differences = []
    for row, (ours, theirs) in enumerate(zip(reference.tokens, other.tokens, strict=True)):
        position = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if position is not None:
            found: dict[str, Any] = {"prompt": row, "position": position}
            if reference.logits[row]:
                logits = reference.logits[row][position].float()
                found["gap"] = round(float(logits[ours[position]] - logits[theirs[position]]), 4)
            differences.append(found)
    total = len(reference.tokens)
    same = sum(
        min([d["position"] for d in differences if d["prompt"] == row] or [len(reference.tokens[row])])
        for row in range(total)
    )
    return {
        "sequences_that_differ": round(len(differences) / total, 4),
        "tokens_before_a_difference": round(same / max(1, sum(map(len, reference.tokens))), 4),
        "differences": differences,
    }  # fmt: skip


def use_graphs(engine: ModelEngine, mode: str) -> None:
    """Replace the engine's graphs by those of this --cudagraph-mode, and capture all."""
    resolved = engine.resolved
    parameters = sum(p.numel() for p in engine.model.layers.parameters())
    keys = graph_keys(mode, resolved.max_num_seqs, resolved.max_num_batched_tokens, (), parameters)
    engine.graphs = Dispatcher(keys, engine.graphs._capture)
    engine.captures = Captures(engine.graphs, engine.captures._clear)
    while engine.idle():
        pass


def ways(engine: ModelEngine, prompts: list[list[int]], num_tokens: int) -> dict[str, Run]:
    def logits(count: int) -> Tensor:
        assert isinstance(engine.head, LogitsSampler)
        return engine.head.logits[:count].clone()

    driver = Driver(engine, prompts, logits)
    use_graphs(engine, "NONE")
    runs = {
        "eager": driver.run(num_tokens),
        "eager again": driver.run(num_tokens),
        "eager, prefix cache warm": driver.run(num_tokens, warm=True),
        "eager, chunks": driver.run(num_tokens, chunk=CHUNK),
        "eager, one by one": driver.alone(num_tokens),
    }
    for mode in ("FULL", "FULL_DECODE_ONLY", "PIECEWISE"):
        use_graphs(engine, mode)
        runs[mode] = driver.run(num_tokens)
        runs[f"{mode}, chunks"] = driver.run(num_tokens, chunk=CHUNK)
        runs[f"{mode}, prefix cache warm"] = driver.run(num_tokens, warm=True)
        print(mode, "replays", dict(engine.graphs.replays), "misses", dict(engine.graphs.misses), flush=True)
    return runs


def transformers_model(engine: ModelEngine, folder: str) -> Any:
    """transformers' own float32 model with this engine's weights."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("cuda"):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    spec = engine.model.spec
    q, kv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    names = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    names |= {"attention.o": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}
    names |= {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
    state: dict[str, Tensor] = {}
    for name, parameter in engine.model.named_parameters():
        value, (stem, _, kind) = parameter.data, name.rpartition(".")
        if not stem.startswith("layers."):
            state[{"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}[stem] + f".{kind}"] = value
            continue
        _, layer, part = stem.split(".", 2)
        prefix = f"model.layers.{layer}."
        if part == "attention.qkv":
            for piece, what in zip(torch.split(value, [q, kv, kv]), "qkv", strict=True):
                state[f"{prefix}self_attn.{what}_proj.{kind}"] = piece
        elif part == "mlp.gate_up":
            for piece, what in zip(value.chunk(2), ("gate", "up"), strict=True):
                state[f"{prefix}mlp.{what}_proj.{kind}"] = piece
        else:
            state[f"{prefix}{names[part]}.{kind}"] = value
    missing, unexpected = theirs.load_state_dict({key: value.float() for key, value in state.items()}, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    theirs.tie_weights()
    return theirs


def errors(
    theirs: Any, prompts: list[list[int]], runs: dict[str, Run], num_sequences: int
) -> dict[str, dict[str, float]]:
    """Mean and largest difference of logits from float32: of each run after its own tokens, and of transformers' bfloat16."""
    rounded = None
    wanted: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in (*runs, "transformers bfloat16")}
    exact: dict[tuple[str, int], Tensor] = {}

    def forward(model: Any, name: str, row: int) -> Tensor:
        tokens = prompts[row] + runs[name].tokens[row][:-1]
        found: Tensor = model(torch.tensor([tokens], device="cuda")).logits[0, len(prompts[row]) - 1 :].float()
        return found

    for name in runs:
        for row in range(num_sequences):
            exact[name, row] = forward(theirs, name, row)
            wanted[name].append((torch.stack(runs[name].logits[row]).float(), exact[name, row]))
    kept = {name: buffer.clone() for name, buffer in theirs.named_buffers() if name.endswith("inv_freq")}
    rounded = theirs.bfloat16()
    for name, buffer in kept.items():  # a model that is loaded in bfloat16 has these in float32
        setattr(rounded.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], buffer)
    first = next(iter(runs))
    for row in range(num_sequences):
        wanted["transformers bfloat16"].append((forward(rounded, first, row), exact[first, row]))
    found = {}
    for name, pairs in wanted.items():
        off = torch.cat([(ours - right).abs() for ours, right in pairs])
        found[name] = {"mean": round(float(off.mean()), 6), "largest": round(float(off.max()), 5)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--float32", type=int, default=4, help="sequences to compare with float32")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if not 1 <= arguments.prompts <= MOST_PROMPTS:
        parser.error(f"--prompts: 1 to {MOST_PROMPTS}, which fill one step")
    begun = time.perf_counter()
    values: dict[str, object] = {
        "model": arguments.model,
        "device": "cuda",
        "load_format": "dummy",
        "dtype": "bfloat16",
    }
    values |= {"max_model_len": MAX_LEN, "max_num_seqs": arguments.prompts, "kv_cache_memory": 8 << 30}
    values["kv_cache_dtype"] = arguments.kv_cache_dtype
    config = resolve.resolve(flags.build(values, None))
    engine = make_engine(config, lambda *progress: None)
    generator = np.random.default_rng(0)
    lengths = np.linspace(5, MAX_LEN * 2 // 3, arguments.prompts).astype(int)
    prompts = [generator.integers(0, engine.facts.vocab_size, length).tolist() for length in lengths]
    with torch.inference_mode():
        runs = ways(engine, prompts, arguments.tokens)
        agreement = {name: compare(runs["eager"], run) for name, run in runs.items() if name != "eager"}
        report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        report |= {"model": Path(arguments.model).name, "kv_cache_dtype": arguments.kv_cache_dtype}
        report |= {"prompts": arguments.prompts, "tokens": arguments.tokens, "against_eager": agreement}
        if arguments.float32:
            some = {name: runs[name] for name in ("eager", "FULL", "FULL, chunks")}
            theirs = transformers_model(engine, arguments.model)
            report["against_float32"] = errors(theirs, prompts, some, min(arguments.float32, arguments.prompts))
    report["seconds"] = round(time.perf_counter() - begun, 1)
    for name, found in agreement.items():
        gaps = [d.get("gap", 0.0) for d in found["differences"]]
        text = f"{found['sequences_that_differ']:7.1%} of sequences differ, {found['tokens_before_a_difference']:.1%} of tokens before"
        print(f"{name:34s} {text}, largest gap {max(gaps, default=0.0)}")
    print(json.dumps(report.get("against_float32", {}), indent=1), f"{report['seconds']} s")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
