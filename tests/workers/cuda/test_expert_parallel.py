"""Experts over two GPUs against one: the same model through the mesh, with graphs, by every way that tokens travel."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from meshlm import LLM, SamplingParams

if torch.cuda.device_count() < 2:
    pytest.skip("needs several CUDA devices", allow_module_level=True)

from serving import serving
from timed_streams import NUM_TOKENS, Stream
from waiting import until

pytestmark = pytest.mark.gpu
TOKENS, AGREED = (
    24,
    0.95,
)  # of the tokens: with random weights a few are as likely as another, as far as bfloat16 can tell
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
PROMPTS = [[5 + (31 * n + 7 * i) % 4000 for i in range(3 + 5 * n % 160)] for n in range(100)]
DP = {"data_parallel_size": 2, "enable_expert_parallel": True}
HALVES = {"enable_dbo": True, "dbo_decode_token_threshold": 8, "dbo_prefill_token_threshold": 64}
MOVES = {"enable_eplb": True, "eplb_config": '{"window_size": 8, "step_interval": 8, "num_redundant_experts": 4}'}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "tp, experts that move": {"tensor_parallel_size": 2, "enable_expert_parallel": True, **MOVES},
    "all-gather": DP,
    "all-gather, halves": DP | HALVES,
    "all-to-all": DP | {"all2all_backend": "all_to_all"},
    "peer memory": DP | {"all2all_backend": "peer_memory"},
    "peer memory, halves": DP | HALVES | {"all2all_backend": "peer_memory"},
    "experts that move": DP | MOVES,
    "experts that move, peer memory, halves": DP | HALVES | MOVES | {"all2all_backend": "peer_memory"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    import tokenizers
    import transformers

    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    made = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SHAPE))
    made.to(torch.bfloat16).save_pretrained(folder)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    return str(folder)


def served(model: str, **settings: Any) -> LLM:
    return LLM(
        model, dtype="bfloat16", max_model_len=512, max_num_seqs=64, max_num_batched_tokens=1024, kv_cache_memory=1 << 28,
        **settings,
    )  # fmt: skip


def answers(llm: LLM) -> list[list[int]]:
    found = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True), use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in found]


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    llm = served(model)
    try:
        return answers(llm)
    finally:
        llm.shutdown()


def agreed(found: list[list[int]], expected: list[list[int]]) -> float:
    """How many of the tokens before the first that differs, and that one, are equal."""
    equal = total = 0
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == TOKENS
        for token, wanted in zip(ours, theirs, strict=True):
            total += 1
            equal += token == wanted
            if token != wanted:
                break
    return equal / total


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tokens_are_those_of_one_gpu(layout: str, model: str, expected: list[list[int]]) -> None:
    llm = served(model, **LAYOUTS[layout])
    try:
        assert agreed(answers(llm), expected) > AGREED
    finally:
        llm.shutdown()


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "peer_memory"])
def test_a_rank_is_killed_under_load(backend: str, model: str) -> None:
    """Steps are halved. CUDA graphs are captured anew with the next group's communicator; each stream has all its tokens."""
    flags: tuple[str, ...] = (
        model,
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "16",
        "--kv-cache-memory",
        "256M",
    )
    flags += ("-dp", "2", "--enable-expert-parallel", "--all2all-backend", backend)
    flags += ("--enable-dbo", "--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "8")
    with serving(*flags) as server, ThreadPoolExecutor(8) as pool:
        for index in (1, 0):
            streams = [Stream(number, temperature=0) for number in range(8)]
            ends = [pool.submit(stream.read, server.url) for stream in streams]
            assert all(stream.begun.wait(60) for stream in streams)
            status = server.status()["processes"]
            (victim,) = [p["pid"] for p in status if (p["role"], p["index"]) == ("worker", index)]
            os.kill(victim, signal.SIGKILL)
            for end in ends:
                end.result(timeout=300)
            assert [len(stream.ids) for stream in streams] == [NUM_TOKENS] * 8
            until(lambda: all(p["state"] == "ready" for p in server.status()["processes"]), 60)
            restarts = {p["index"]: p["restarts"] for p in server.status()["processes"] if p["role"] == "worker"}
            assert restarts == {1: 1, 0: 1 - index}, "the other rank keeps its weights"
