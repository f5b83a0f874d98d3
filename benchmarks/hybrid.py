"""How models with recurrent states share one pool of pages: tokens of a block, groups, bytes that hold nothing, tokens held, and how
long a prefix the cache finds, and which kind of group ended it.

By the worker's layout and the scheduler's KVCache, for shapes of published models in bfloat16. No weights, no device.

python -P benchmarks/hybrid.py [--memory-gib 40] [--max-model-len 32768] [--json FILE]
python -P benchmarks/hybrid.py --steps [--shapes bamba-9b ...] [--batch 1 64] [--json FILE]

--steps: on a GPU, dummy weights: prompts and decode steps of these shapes by benchmarks/engine_step.py, each in a process of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from meshlm.architectures.registry import family_of
from meshlm.protocol.config.engine import CacheConfig
from meshlm.protocol.edges.admit import EngineRequest
from meshlm.protocol.model import ModelSpec
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.scheduler_proc.kv.cache import KVCache
from meshlm.scheduler_proc.request import Request
from meshlm.workers.kv.layout import KVLayout

STEP, PREFIX, PROMPT = 8192, 20000, 20500  # tokens of a step; that two prompts share; of each
_DENSE = {"vocab_size": 128000, "max_position_embeddings": 131072, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "bamba-9b": json.loads((Path(__file__).parent / "models" / "bamba-9b" / "config.json").read_text("utf-8")),
    "granite-4.0-h-small": {
        **_DENSE,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
    "nemotron-h-8b": {
        **_DENSE,
        "architectures": ["NemotronHForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    },
    "jamba-1.5-mini": {
        **_DENSE,
        "architectures": ["JambaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "falcon-h1-7b": {
        **_DENSE,
        "architectures": ["FalconH1ForCausalLM"],
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 44,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_d_state": 256,
    },
    "lfm2-1.2b": {
        **_DENSE,
        "architectures": ["Lfm2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "qwen3-next-80b-a3b": {
        **_DENSE,
        "architectures": ["Qwen3NextForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    """What the family makes of a config.json."""
    family = family_of(config["architectures"][0])
    assert family is not None
    return family.spec({**family.defaults, **config}, family.architecture)


def request_of(number: int, tokens: list[int]) -> Request:
    work = EngineRequest(RequestId(f"r{number}"), Handle(number), pack_i32(tokens), SamplingParams())
    return Request(work, Identity(Role.DETOKENIZER), Incarnation(1), len(tokens) + 1)


def computed(cache: KVCache, request: Request) -> int:
    """Compute the prompt in steps; the tokens that were found."""
    hit = request.num_computed = cache.match(request)
    while request.num_computed < len(request.tokens):
        count = cache.step_end(request.num_computed, min(STEP, len(request.tokens) - request.num_computed))
        assert cache.grow(request, request.num_computed + count) is not None
        request.num_computed += count
        cache.cache_full(request, request.num_computed)
    return hit


def measure(name: str, ssm: Any, mode: Any, budget: int, length: int) -> dict[str, Any]:
    """One model with states of this dtype."""
    given = CacheConfig(mamba_ssm_cache_dtype=ssm, mamba_cache_mode=mode)
    layout = KVLayout(spec_of(SHAPES[name]), 16, length, torch.bfloat16, cache=given, model_dtype=torch.bfloat16)
    pages = budget // layout.page_bytes
    cache = KVCache(pages, layout.block_size, layout.specs, step_tokens=STEP)
    shared = list(range(PREFIX))
    for number in range(2):
        request = request_of(number, shared + [number] * (PROMPT - PREFIX))
        hit = computed(cache, request)
        limited = cache.limited
        cache.free(request)
    return {
        "model": name,
        "ssm_dtype": ssm,
        "mode": mode,
        "block_tokens": layout.block_size,
        "groups": len(layout.specs),
        "page_mib": round(layout.page_bytes / 2**20, 2),
        "waste": round(layout.waste, 4),
        "tokens_held": layout.tokens_held(pages, length),
        "prefix": PREFIX,
        "found": hit,
        "limited_by": limited,
    }


def step_command(name: str, folder: Path, batches: list[int]) -> list[str]:
    """What measures the steps of a shape, whose config.json is written to the folder; the results go there, too."""
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    sizes = [str(batch) for batch in batches]
    where = ["--json", str(folder / "steps.json"), "--max-num-seqs", str(max(batches))]
    return [sys.executable, "-P", str(Path(__file__).parent / "engine_step.py"), str(folder), "--batch", *sizes, *where]


def steps(names: list[str], batches: list[int]) -> list[dict[str, Any]]:
    """Each shape's steps, or the last line of why it has none."""
    found = []
    for name in names:
        with tempfile.TemporaryDirectory() as made:
            done = subprocess.run(step_command(name, Path(made), batches), capture_output=True, text=True, check=False)
            told = Path(made) / "steps.json"
            result = (
                json.loads(told.read_text()) if told.exists() else {"failed": done.stderr.strip().splitlines()[-1:]}
            )
        found.append({**result, "model": name})
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--memory-gib", type=float, default=40)
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    if arguments.steps:
        measured = steps(arguments.shapes, arguments.batch)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(measured, indent=1) + "\n")
        return
    budget, results = int(arguments.memory_gib * 2**30), []
    for name in arguments.shapes:
        for ssm, mode in (("auto", "align"), ("auto", "all"), ("float32", "align")):
            results.append(measure(name, ssm, mode, budget, arguments.max_model_len))
            print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        told = {"memory_gib": arguments.memory_gib, "max_model_len": arguments.max_model_len, "results": results}
        Path(arguments.json).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
