"""A small mixture of experts, and what streams of it say: shared by the tests of expert parallelism."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving import Serving
from timed_streams import Stream

NUM_STREAMS, NUM_TOKENS = 6, 150
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
            end.result(timeout=300)
    return [stream.ids for stream in streams]


def mixture(folder: Path, tokenizer: Path) -> tuple[str, ...]:
    """The flags that serve it on the CPU."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    model = (str(folder), "--tokenizer", str(tokenizer), "--load-format", "dummy", "--device", "cpu")
    return (*model, "--kv-cache-memory", "64M", "--max-num-batched-tokens", "64", "--cpu-threads", "1")
