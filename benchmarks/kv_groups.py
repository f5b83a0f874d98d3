"""How many tokens the KV cache of gemma-3-4b holds with its two kinds of groups, and with one that keeps every block.

By the worker's planning of memory and the scheduler's KVCache: requests come one after the other, are computed in chunks and decode,
until the next one finds no blocks. No weights, no device.

python -P benchmarks/kv_groups.py [--memory-gib 40] [--max-model-len 32768] [--json FILE]
"""

import argparse
import json
import tempfile
from pathlib import Path

import tokenizers
import torch
from msgspec.structs import replace

from meshlm.protocol.admit_edge import EngineRequest
from meshlm.protocol.columns import pack_i32
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.protocol.kv import step_tokens
from meshlm.protocol.model import ModelSpec
from meshlm.protocol.sampling import SamplingParams
from meshlm.scheduler_proc.kv.cache import KVCache
from meshlm.scheduler_proc.request import Request
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers import memory
from meshlm.workers.kv.layout import KVLayout

DECODES = 256  # tokens that each request has decoded when they are counted
GEMMA_3_4B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "torch_dtype": "bfloat16",
}


def configured(max_model_len: int) -> MeshConfig:
    """What the supervisor makes of gemma-3-4b's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(GEMMA_3_4B))
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(f"{folder}/tokenizer.json")
        values: dict[str, object] = {"model": folder, "device": "cpu", "load_format": "dummy"}
        return resolve.resolve(flags.build({**values, "max_model_len": max_model_len, "max_num_seqs": 1024}, None))


def request_of(number: int, num_tokens: int) -> Request:
    work = EngineRequest(RequestId(f"r{number}"), Handle(number), pack_i32([number] * num_tokens), SamplingParams())
    return Request(work, Identity(Role.DETOKENIZER), Incarnation(1), num_tokens + 1)


def held(config: MeshConfig, model: ModelSpec, budget: int) -> dict[str, int]:
    """Pages within `budget` bytes, and the tokens of as many requests of the longest length as decode side by side in them."""
    resolved = config.resolved
    assert resolved is not None
    length, chunk = resolved.max_model_len, resolved.max_num_batched_tokens
    layout = KVLayout(model, config.cache.block_size, length, torch.bfloat16)
    num_pages = memory.num_pages(config, budget, layout)
    at_once = step_tokens(chunk, config.scheduler.async_depth, 0)
    cache = KVCache(num_pages, layout.block_size, layout.specs, step_tokens=at_once)
    running: list[Request] = []
    while True:
        request = request_of(len(running), length)
        while request.num_computed < length:
            left = length - DECODES - request.num_computed
            if cache.grow(request, request.num_computed + max(1, min(chunk, left))) is None:
                tokens = sum(len(one.tokens) for one in running)
                cache.free(request)
                cache.check(running)
                return {
                    "groups": len(layout.specs),
                    "page_bytes": layout.page_bytes,
                    "pages": num_pages,
                    "tokens": tokens,
                }
            request.num_computed += max(1, min(chunk, left))
        running.append(request)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-gib", type=float, default=40)
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    config = configured(arguments.max_model_len)
    assert config.resolved is not None
    budget, model = int(arguments.memory_gib * 2**30), config.resolved.spec
    grouped, every = (
        held(config, model, budget),
        held(config, replace(model, sliding_window=0, sliding_layers=()), budget),
    )
    result = {
        "memory_gib": arguments.memory_gib,
        "max_model_len": arguments.max_model_len,
        "grouped": grouped,
        "every": every,
    }
    result["times"] = round(grouped["tokens"] / every["tokens"], 2)
    print(json.dumps(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
