"""The CPU engine is batch-invariant: a request's logits and draws are the same to the last bit however its steps are made up."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from packed_models import KINDS as PACKED
from packed_models import write as write_packed
from quantised_models import KINDS as QUANTISED
from quantised_models import write as write_quantised
from sharded_models import Threads, load_shards, together
from small_models import BLOCK, CLASSIC, DEEPSEEK, DENSE, GEMMA, GEMMA4, LATENT, MOE, SMALL, caches, load, run
from torch import Tensor

from meshlm.architectures.registry import family_of
from meshlm.kernels.silu_mul.reference import ACTIVATIONS, sigmoid
from meshlm.protocol.sampling import SamplingParams
from meshlm.supervisor.settings import determinism
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.models.cpu_layers import fuse_decoder
from meshlm.workers.models.decoder import Decoder, LayerClasses
from meshlm.workers.output import logprobs
from meshlm.workers.output.sampler import SampleRows, sample
from meshlm.workers.rows.columns import RowColumns

LENGTH = 120  # more than one block of 64 keys
OTHERS = 17
ODD: dict[str, Any] = {"hidden_size": 60, "num_key_value_heads": 6, "intermediate_size": 83, "vocab_size": 213}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-odd-sizes": ("LlamaConfig", ODD),  # heads of 10, no grouping
    "llama-one-kv-head": ("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 72}),
    "llama-gelu": ("LlamaConfig", {"hidden_act": "gelu", "intermediate_size": 83}),
    "llama-gelu-tanh": ("LlamaConfig", {"hidden_act": "gelu_pytorch_tanh", "intermediate_size": 83}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "mistral-wide": ("MistralConfig", {"sliding_window": 70}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "deepseek without experts": ("DeepseekV3Config", LATENT | {"q_lora_rank": 20, "first_k_dense_replace": 3}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
}
EXPERTS = ("mixtral", "qwen2-moe-some", "gpt-oss", "llama4", "qwen3-moe-sparse")
LIKE: tuple[str, ...] = (
    "olmo2",
    "cohere",
    "glm4",
    "starcoder2",
    "exaone4",
    "granite-moe",
    "glm4-moe",
    "minimax-m2",
    "olmo",
    "olmoe",
    "phimoe",
)
LIKE += (
    "hunyuan",
    "ministral3",
    "gpt2",
    "phi",
    "bloom",
    "falcon-11b",
    "deepseek-v2",
    "deepseek-v3",
    "gemma4-e2b",
    "gemma4-moe",
)
OF_ALL = {**MOE, **DENSE, **CLASSIC, **DEEPSEEK, **GEMMA4}
OTHER_CASES = {name: OF_ALL[name] for name in (*EXPERTS, *LIKE)} | {"gemma": ("GemmaConfig", {"head_dim": 16})}
OTHER_CASES["gpt2"][1]["n_positions"] = LENGTH
EACH = CASES | OTHER_CASES


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def model_of(case: str, path: Path) -> Decoder:
    import transformers

    torch.manual_seed(0)
    name, extra = EACH[case]
    config = getattr(transformers, name)(**{**SMALL, **extra})
    config._attn_implementation = "eager"
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    model = load(path)
    assert not isinstance(model.ops, TorchOps), "the CPU kernels could not be compiled"
    fuse_decoder(model, "cpu")
    assert case not in CASES or (model.executor is None) == (model.classes != LayerClasses())
    return model


def cut(length: int, chance: random.Random, most: int) -> list[int]:
    """`length` in random parts."""
    parts: list[int] = []
    while sum(parts) < length:
        parts.append(min(chance.randint(1, most), length - sum(parts)))
    return parts


class Crowd:
    """One request whose logits are watched, and others that come and go beside it."""

    def __init__(self, model: Decoder, tokens: list[int], others: int, chance: random.Random) -> None:
        self._model, self._tokens, self._others, self._chance = model, tokens, others, chance
        blocks = list(range((1 + OTHERS) * LENGTH // BLOCK))
        chance.shuffle(blocks)  # a context lies anywhere
        self._tables = [blocks[place::18][: LENGTH // BLOCK] for place in range(1 + OTHERS)]
        self._kv = caches(model.local, len(blocks))
        for cache in self._kv:
            cache.keys.fill_(torch.nan)  # what nobody wrote counts for nobody
            cache.values.fill_(torch.nan)
        self._at = [0] * (1 + OTHERS)

    def logits(self, parts: list[int]) -> Tensor:
        """[LENGTH, vocab] of the request, computed in these parts."""
        found: list[Tensor] = []
        for count in parts:
            steps = [(0, self._tokens[self._at[0] : self._at[0] + count])]
            for other in range(1, 1 + self._others):
                wide = self._chance.choice((1, 1, 1, 2, 5, 19))
                if self._at[other] + wide > LENGTH:
                    self._at[other] = 0
                steps.append((other, [self._chance.randrange(200) for _ in range(wide)]))
            self._chance.shuffle(steps)
            steps.sort(key=lambda step: len(step[1]) > 1)  # decodes first
            out = run(self._model, self._kv, [(ids, self._at[who], self._tables[who]) for who, ids in steps])
            begin = 0
            for who, ids in steps:
                if who == 0:
                    found.append(out[begin : begin + len(ids)])
                begin += len(ids)
                self._at[who] += len(ids)
        return torch.cat(found)


@pytest.mark.parametrize("case", CASES)
def test_logits_do_not_depend_on_the_step(case: str, tmp_path: Path) -> None:
    """Token by token, whole, in odd chunks, beside 1 to 17 others, with 1, 2 and 3 threads."""
    model, chance = model_of(case, tmp_path), random.Random(case)
    tokens = [chance.randrange(200) for _ in range(LENGTH)]
    torch.set_num_threads(1)
    expected = Crowd(model, tokens, 0, chance).logits([1] * LENGTH)
    assert expected.isfinite().all()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(Crowd(model, tokens, 0, chance).logits([LENGTH]), expected), f"whole, {threads} threads"
        for most in (7, 33, 90) if threads == 1 else (33,):
            found = Crowd(model, tokens, 0, chance).logits(cut(LENGTH, chance, most))
            assert torch.equal(found, expected), f"chunks of at most {most}, {threads} threads"
        for others in (1, 2, 5, 11, 17) if threads == 1 else (5, 8):
            parts = cut(LENGTH, chance, 30) if others % 2 else [LENGTH]
            found = Crowd(model, tokens, others, chance).logits(parts)
            assert torch.equal(found, expected), f"{parts} beside {others}, {threads} threads"
    torch.set_num_threads(2)
    resumed = [57, *[1] * 20, LENGTH - 77]
    assert torch.equal(Crowd(model, tokens, 3, chance).logits(resumed), expected), "prefill, decodes, prefill"


def check_some_steps(model: Decoder, chance: random.Random) -> None:
    """Whole, with decodes between two prompts, and in chunks beside others with 2 threads."""
    tokens = [chance.randrange(200) for _ in range(LENGTH)]
    torch.set_num_threads(1)
    expected = Crowd(model, tokens, 0, chance).logits([LENGTH])
    assert expected.isfinite().all()
    torch.set_num_threads(2)
    for others, parts in (
        (0, [57, *[1] * 8, LENGTH - 65]),
        (1, cut(LENGTH, chance, 90)),
        (17, cut(LENGTH, chance, 60)),
    ):
        found = Crowd(model, tokens, others, chance).logits(parts)
        assert torch.equal(found, expected), f"{parts} beside {others}"


@pytest.mark.parametrize("case", OTHER_CASES)
def test_logits_of_other_models_and_of_experts(case: str, tmp_path: Path) -> None:
    check_some_steps(model_of(case, tmp_path), random.Random(case))


@pytest.mark.parametrize("name", ["gptq-act-order", "w8a16", "fp8-dynamic", "fp8-blocks"])
def test_logits_of_quantised_weights(name: str, tmp_path: Path) -> None:
    if name in PACKED:
        write_packed(tmp_path, PACKED[name])
    else:
        write_quantised(tmp_path, QUANTISED[name])
    check_some_steps(load(tmp_path), random.Random(name))


@pytest.mark.parametrize("case", ["llama", "qwen2-moe-some"])
def test_logits_of_two_tensor_parallel_ranks(case: str, tmp_path: Path) -> None:
    """For two ranks there is one order of a sum."""
    model_of(case, tmp_path)

    def work(model: Decoder, comm: Threads) -> Tensor:
        chance = random.Random(case)
        tokens = [chance.randrange(200) for _ in range(LENGTH)]
        steps = ((0, [LENGTH]), (0, [57, *[1] * 8, LENGTH - 65]), (5, cut(LENGTH, chance, 50)))
        return torch.stack([Crowd(model, tokens, others, chance).logits(parts) for others, parts in steps])

    for found in together(load_shards(tmp_path, 2, 1), work):
        assert found.isfinite().all()
        for other in found[1:]:
            assert torch.equal(other, found[0])


def test_each_class_that_is_said_to_be_proven_is_compared_here() -> None:
    """--deterministic takes those alone (supervisor/settings/determinism.py)."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    found = set()
    for name, _ in EACH.values():
        kind = getattr(transformers, name).model_type
        family = family_of(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
        assert family is not None
        found.add(family.model)
    assert set(determinism.PROVEN) == found


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("name", PLAIN)
def test_activations_do_not_depend_on_the_place(name: str) -> None:
    """Nor on how many elements there are: those of a vector of the processor and those behind the last one are computed alike."""
    assert PLAIN.keys() == {*ACTIVATIONS, "sigmoid"}
    act = ACTIVATIONS.get(name, sigmoid)
    x = torch.randn(70_001, generator=torch.Generator().manual_seed(0)) * 4
    torch.set_num_threads(1)
    expected = act(x)
    exact = PLAIN[name](x.double())
    torch.testing.assert_close(expected.double(), exact, atol=1e-6, rtol=1e-6)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for begin, end in ((0, 1), (5, 6), (3, 20), (1, 34), (7, 40_000), (40_001, 70_001), (1, 70_001)):
            assert torch.equal(act(x[begin:end]), expected[begin:end]), (threads, begin, end)
        rows = x[:70_000].view(100, 700)
        assert torch.equal(act(rows[:, 13:400]), expected[:70_000].view(100, 700)[:, 13:400]), threads


PARAMS = [
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, seed=6, top_p=0.9),
    SamplingParams(temperature=1.3, seed=7, top_k=40, top_p=0.95),
    SamplingParams(temperature=0.9, seed=8, min_p=0.05),
    SamplingParams(temperature=1.0, seed=9, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(temperature=0.0, seed=10),
    SamplingParams(temperature=1.0, seed=11, typical_p=0.8),
    SamplingParams(temperature=1.0, seed=12, top_n_sigma=1.5),
    SamplingParams(temperature=1.0, seed=13, xtc_probability=0.7, xtc_threshold=0.01),
    SamplingParams(temperature=1.0, seed=14, dry_multiplier=0.8),
]


def drawn(logits: Tensor, params: list[SamplingParams], row: int) -> int:
    """What row `row` draws when all rows of logits are sampled together."""
    n = len(params)
    table = RowColumns(n)
    for place, one in enumerate(params):
        table.set(place, one)
    tokens = torch.arange(40, dtype=torch.int32).repeat(n, 1)
    lens = np.full(n, 30)
    at = SampleRows(np.arange(n, dtype=np.int32), np.full(n, 9), lens, lens - 20)
    return int(sample(logits.clone(), at, table, tokens)[row])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_draws_do_not_depend_on_the_batch(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do the cumulative sums that they invert: those are compared bit for bit."""

    seen: list[Tensor] = []

    def search(cumulative: Tensor, *arguments: Any, **options: Any) -> Tensor:
        seen.append(cumulative.clone())
        return real(cumulative, *arguments, **options)

    real = torch.searchsorted
    monkeypatch.setattr(torch, "searchsorted", search)
    torch.set_num_threads(threads)
    logits = torch.randn(17, 49_153, generator=torch.Generator().manual_seed(0)) * 3
    for number, one in enumerate(PARAMS):
        seen.clear()
        alone = drawn(logits[:1], [one], 0)
        sums = seen[0][0] if seen else None
        for n in (2, 3, 8, 17):
            row = (n * 7 + number) % n
            batch = logits[:n].clone()
            batch[[0, row]] = batch[[row, 0]]
            params = [PARAMS[(number + place - row) % len(PARAMS)] for place in range(n)]
            seen.clear()
            assert drawn(batch, params, row) == alone, (one, n)
            if sums is not None:
                assert torch.equal(seen[0][row], sums), (one, n)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_logprobs_do_not_depend_on_the_batch(threads: int) -> None:
    torch.set_num_threads(threads)
    logits = torch.randn(17, 49_153, generator=torch.Generator().manual_seed(1)) * 3
    ids = torch.arange(17) * 100
    whole = np.frombuffer(logprobs.columns(logits, ids, 5).logprobs, np.float32)
    for row in range(17):
        alone = np.frombuffer(logprobs.columns(logits[row : row + 1], ids[row : row + 1], 5).logprobs, np.float32)
        assert alone[0] == whole[row]
