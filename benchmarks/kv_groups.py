"""How many tokens the KV cache of a Gemma holds with its two kinds of groups, and with one that keeps every block.

By the worker's planning of memory and the scheduler's KVCache: requests come one after the other, are computed in chunks and decode,
until the next one finds no blocks. No weights, no device.

    python -P benchmarks/kv_groups.py [--model gemma3-4b] [--memory-gib 40] [--max-model-len 32768] [--request-tokens N ...]
                                      [--json FILE]

The model is one of benchmarks/shapes.py. `found` is what a request finds cached of PREFIX tokens that it shares with one that decodes,
and with one that has ended.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch

sys.path.insert(0, str(Path(__file__).parent))
import harness
import shapes

from meshlm.architectures.layers import with_attention
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.admit import EngineRequest
from meshlm.protocol.kv import step_tokens
from meshlm.protocol.model import ModelSpec
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.scheduler_proc.kv.cache import KVCache
from meshlm.scheduler_proc.request import Request
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers import memory
from meshlm.workers.kv.layout import KVLayout

DECODES = 256  # tokens that each request has decoded when they are counted
PREFIX, OWN = 32768, 1024  # tokens that two requests share, and of each alone


def configured(model: str, max_model_len: int) -> MeshConfig:
    """What the supervisor makes of the model's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shapes.config_of(model)))
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(f"{folder}/tokenizer.json")
        values: dict[str, object] = {"model": folder, "device": "cpu", "load_format": "dummy"}
        return resolve.resolve(flags.build({**values, "max_model_len": max_model_len, "max_num_seqs": 1024}, None))


def request_of(number: int, tokens: list[int]) -> Request:
    work = EngineRequest(RequestId(f"r{number}"), Handle(number), pack_i32(tokens), SamplingParams())
    return Request(work, Identity(Role.DETOKENIZER), Incarnation(1), len(tokens) + 1)


def steps(length: int, chunk: int) -> list[int]:
    """Tokens of each step of a request: its prompt in chunks, and DECODES tokens."""
    prompt = length - DECODES
    return [min(chunk, prompt - done) for done in range(0, prompt, chunk)] + [1] * DECODES


def cache_of(config: MeshConfig, model: ModelSpec, budget: int) -> tuple[KVCache, KVLayout]:
    """The scheduler's, with the pages that a worker has room for within `budget` bytes."""
    resolved = config.resolved
    assert resolved is not None
    layout = KVLayout(model, config.cache.block_size, resolved.max_model_len, torch.bfloat16)
    num_pages = memory.num_pages(config, budget, layout)
    at_once = step_tokens(resolved.max_num_batched_tokens, config.scheduler.async_depth, 0)
    return KVCache(num_pages, layout.block_size, layout.specs, step_tokens=at_once), layout


def held(config: MeshConfig, model: ModelSpec, budget: int, length: int) -> dict[str, int]:
    """Pages within `budget` bytes, and the tokens of as many requests of `length` as decode side by side in them."""
    assert config.resolved is not None
    cache, layout = cache_of(config, model, budget)
    running: list[Request] = []
    while True:
        request = request_of(len(running), [len(running)] * length)
        for count in steps(length, config.resolved.max_num_batched_tokens):
            if cache.grow(request, request.num_computed + count, running) is None:
                tokens = sum(len(one.tokens) for one in running)
                cache.free(request)
                cache.check(running)
                facts = {"groups": len(layout.specs), "page_bytes": layout.page_bytes}
                return {**facts, "pages": cache.pool.num_blocks, "tokens": tokens}
            request.num_computed += count
        running.append(request)


def found(config: MeshConfig, model: ModelSpec, budget: int) -> list[int]:
    """Of PREFIX shared tokens: what another request finds while the first decodes, and when it has ended."""
    assert config.resolved is not None
    cache, _ = cache_of(config, model, budget)
    first = request_of(1, [0] * PREFIX + [1] * OWN)
    for count in steps(PREFIX + OWN, config.resolved.max_num_batched_tokens):
        assert cache.grow(first, first.num_computed + count) is not None
        first.num_computed += count
        cache.cache_full(first, first.num_computed)
    hits: list[int] = []
    for number in (2, 3):
        other = request_of(number, [0] * PREFIX + [number] * OWN)
        hits.append(cache.match(other))
        cache.free(other)
        if number == 2:
            cache.free(first)
    return hits


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="gemma3-4b", choices=[name for name in shapes.SHAPES if "gemma" in name])
    parser.add_argument("--memory-gib", type=float, default=40)
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument(
        "--request-tokens", type=int, nargs="+", help="of each request; else the most that there may be"
    )
    given = parser.parse_args()
    config = configured(given.model, given.max_model_len)
    assert config.resolved is not None
    budget, model = int(given.memory_gib * 2**30), config.resolved.spec
    keeps_all = with_attention(model, sliding_window=0)
    results: list[dict[str, Any]] = []
    for length in given.request_tokens or [given.max_model_len]:
        grouped, every = held(config, model, budget, length), held(config, keeps_all, budget, length)
        times = round(grouped["tokens"] / max(1, every["tokens"]), 2)
        results.append({"request_tokens": length, "grouped": grouped, "every": every, "times": times})
    hits = {"grouped": found(config, model, budget), "every": found(config, keeps_all, budget)}
    report = {
        "model": given.model, "memory_gib": given.memory_gib, "max_model_len": given.max_model_len, "results": results,
        "prefix": PREFIX, "found": hits,
    }  # fmt: skip
    print(json.dumps(report))
    harness.keep(given.json, report)


if __name__ == "__main__":
    main()
