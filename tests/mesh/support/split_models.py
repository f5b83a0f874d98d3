"""Small models that are split over processes, and what they say in one: shared by the tests of parallelism."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import tokenizers
import torch
from serving import Serving

from meshlm.supervisor.settings import flags, resolve
from meshlm.workers import memory
from meshlm.workers.attention.backend import TorchBackend
from meshlm.workers.batch import RequestLens, StepInputs
from meshlm.workers.kv.layout import KVLayout
from meshlm.workers.weights.load import load_model

SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 24},  # blocks are freed while requests run
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}
PROMPTS = [[3 + 7 * i % 200 for i in range(length)] for length in (5, 40, 17, 130)]
COUNT = 24
FLAGS = (
    *("--device", "cpu", "--cpu-threads", "1", "--kv-cache-memory", "8M", "--max-num-batched-tokens", "64"),
    *("--standby-roles", "none"),  # nobody kills the detokenizer or the coordinator here
)


def small_model(folder: Path, kind: str) -> str:
    (folder / "config.json").write_text(json.dumps({**SHAPE, **KINDS[kind], "model_type": kind}))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    return str(folder)


def greedy(server: Serving, prompts: list[list[int]] = PROMPTS, count: int = COUNT) -> list[list[int]]:
    """Token ids for all prompts at once."""

    def one(prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def reference(folder: str, prompt: list[int], load_format: str = "dummy", num_tokens: int = COUNT) -> list[int]:
    values: dict[str, object] = {"model": folder, "load_format": load_format, "device": "cpu", "max_num_seqs": 4}
    resolved = resolve.resolve(flags.build(values, None)).resolved
    assert resolved is not None
    tokens = list(prompt)
    with torch.inference_mode():
        model = load_model(resolved, torch.device("cpu"), 0, lambda done, total: None)
        kv = memory.make_caches(KVLayout(resolved.spec, 16, 0, torch.float32), 64, torch.device("cpu"))
        while len(tokens) < len(prompt) + num_tokens:
            at, count = torch.arange(len(tokens)), len(tokens)
            table, last = torch.arange(64)[None], torch.tensor([count - 1])
            lens = torch.tensor([count])
            batch = StepInputs(
                torch.tensor(tokens), at, (at,), (table,), last, 0, RequestLens(lens, (count,), (count,), 0)
            )
            hidden = model(batch, kv, TorchBackend().step(batch, 16))
            tokens.append(int(model.logits(hidden[last]).argmax()))
    return tokens[len(prompt) :]
