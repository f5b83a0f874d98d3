"""A mixture of experts over two ranks, on the CPU: the tokens are those of one rank with all experts, also when ranks die."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import Serving, serving
from timed_streams import Stream
from waiting import until

pytestmark = pytest.mark.mesh
NUM_STREAMS, NUM_TOKENS = 4, 150
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 49152,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def texts(server: Serving) -> list[list[int]]:
    """What each of the streams says, all at once."""
    streams = [Stream(number, temperature=0, max_tokens=NUM_TOKENS) for number in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        for end in [pool.submit(stream.read, server.url) for stream in streams]:
            end.result(timeout=90)
    return [stream.ids for stream in streams]


def test_ranks_share_experts_and_none_is_missed_when_it_dies(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    flags: tuple[str, ...] = (str(tmp_path), "--tokenizer", str(smollm2), "--load-format", "dummy", "--device", "cpu")
    flags += ("--kv-cache-memory", "64M", "--max-num-batched-tokens", "64", "--cpu-threads", "1")
    with serving(*flags) as server:
        expected = texts(server)
    with serving(*flags, "-dp", "2", "--enable-expert-parallel") as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        assert texts(server) == expected
        for role, index in (("worker", 1), ("worker", 0), ("scheduler", 1)):
            streams = [Stream(number, temperature=0, max_tokens=NUM_TOKENS) for number in range(NUM_STREAMS)]
            ends = [pool.submit(stream.read, server.url) for stream in streams]
            assert all(stream.begun.wait(30) for stream in streams)
            status = server.status()["processes"]
            (victim,) = [p["pid"] for p in status if (p["role"], p["index"]) == (role, index)]
            os.kill(victim, signal.SIGKILL)
            for end in ends:
                end.result(timeout=90)
            assert [stream.ids for stream in streams] == expected, (role, index)
            until(lambda: all(p["state"] == "ready" for p in server.status()["processes"]), 60)
