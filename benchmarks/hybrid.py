"""How models with recurrent states share one pool of pages: tokens of a block, groups, bytes that hold nothing, tokens held, and how
long a prefix the cache finds, and which kind of group ended it.

By the worker's layout and the scheduler's KVCache, for shapes of published models in bfloat16. No weights, no device.

    python -P benchmarks/hybrid.py [--memory-gib 40] [--max-model-len 32768] [--json FILE]
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import harness
from kv_groups import request_of

from meshlm.architectures.registry import family_of
from meshlm.protocol.config.engine import CacheConfig
from meshlm.protocol.model import ModelSpec
from meshlm.scheduler_proc.kv.cache import KVCache
from meshlm.scheduler_proc.request import Request
from meshlm.workers.kv.layout import KVLayout

STEP, PREFIX, PROMPT = 8192, 20000, 20500  # tokens of a step; that two prompts share; of each
MODELS = Path(__file__).parent / "models"
SHAPES: dict[str, dict[str, Any]] = {
    "bamba-9b": json.loads((MODELS / "bamba-9b" / "config.json").read_text("utf-8")),
    **json.loads((MODELS / "hybrid_shapes.json").read_text("utf-8")),
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    """What the family makes of a config.json."""
    family = family_of(config["architectures"][0])
    assert family is not None
    return family.spec({**family.defaults, **config}, family.architecture)


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


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--memory-gib", type=float, default=40)
    parser.add_argument("--max-model-len", type=int, default=32768)
    arguments = parser.parse_args()
    budget, results = int(arguments.memory_gib * 2**30), []
    for name in arguments.shapes:
        for ssm, mode in (("auto", "align"), ("auto", "all"), ("float32", "align")):
            results.append(measure(name, ssm, mode, budget, arguments.max_model_len))
            print(json.dumps(results[-1]), flush=True)
    told = {"memory_gib": arguments.memory_gib, "max_model_len": arguments.max_model_len, "results": results}
    harness.keep(arguments.json, told)


if __name__ == "__main__":
    main()
