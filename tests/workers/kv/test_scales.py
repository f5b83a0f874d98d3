"""A KV cache of 8-bit floats on a CPU: what is read, which scales it has, and that every start and every rank finds the same ones."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
import torch
from cpu_steps import LENGTH, MODEL, OUTPUT, PROMPTS, alone, new, step, tokens_of
from sharded_models import Threads, load_shards, together
from small_models import CPU, SMALL, resolved

from meshlm.kernels import float8
from meshlm.protocol.sampling import SamplingParams
from meshlm.runtime.errors import ProcessFatal
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine import kv_scales
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine
from meshlm.workers.models.decoder import Decoder

GREEDY = SamplingParams(temperature=0.0)


def engine(folder: Path, **settings: object) -> ModelEngine:
    (folder / "config.json").write_text(json.dumps(MODEL))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    values: dict[str, object] = {"model": str(folder), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    values |= {"max_model_len": LENGTH, "max_num_seqs": 4, "cpu_threads": 1, **settings}
    return make_engine(resolve.resolve(flags.build(values, None)), lambda *progress: None)


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    grad, count = torch.is_grad_enabled(), torch.get_num_threads()
    yield
    torch.set_grad_enabled(grad)
    torch.set_num_threads(count)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "stored"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_chunks_and_decodes_read_what_a_whole_prompt_does(
    dtype: str, kind: str, stored: torch.dtype, tmp_path: Path
) -> None:
    made = engine(tmp_path, dtype=dtype, kv_cache_dtype=kind, calculate_kv_scales=kind == "fp8")
    assert made.layout.dtype == stored
    assert {cache.keys.dtype for cache in made.compute.caches} == {stored}
    expected = [alone(made, prompt, GREEDY) for prompt in PROMPTS[1:]]
    news = [new(row, prompt, GREEDY) for row, prompt in enumerate(PROMPTS[1:])]
    found: list[list[int]] = [[], []]
    found[0] += tokens_of(step(made, [(0, 0, 25, True)], news[:1]))
    found[0] += tokens_of(step(made, [(0, 25, 1, True), (1, 0, 20, False)], news[1:]))
    mixed = tokens_of(step(made, [(0, 26, 1, True), (1, 20, 25, True)], []))
    found = [[*found[0], mixed[0]], mixed[1:]]
    while len(found[1]) < OUTPUT:
        decodes = [(row, len(PROMPTS[row + 1]) + len(tokens) - 1, 1, True) for row, tokens in enumerate(found)]
        for tokens, token in zip(found, tokens_of(step(made, decodes, [])), strict=True):
            tokens.append(token)
    assert [tokens[:OUTPUT] for tokens in found] == expected


def test_calculated_scales_are_those_of_every_start(tmp_path: Path) -> None:
    """They are no two layers' alike, they are what the tokens of the start say, and requests do not change them."""
    made = engine(tmp_path, kv_cache_dtype="fp8", calculate_kv_scales=True)
    found = [(cache.k_scale, cache.v_scale) for cache in made.compute.caches]
    assert len(set(found)) == 2
    alone(made, PROMPTS[1], GREEDY)
    again = engine(tmp_path, kv_cache_dtype="fp8", calculate_kv_scales=True)
    assert [(cache.k_scale, cache.v_scale) for cache in again.compute.caches] == found
    plain = engine(tmp_path)
    ids = [at * kv_scales.STRIDE % MODEL["vocab_size"] for at in range(LENGTH)]  # type: ignore[operator]
    step(plain, [(0, 0, LENGTH - 1, True)], [new(0, ids[: LENGTH - 1], GREEDY)])
    for (k_scale, v_scale), cache in zip(found, plain.compute.caches, strict=True):
        assert k_scale == pytest.approx(float(cache.keys.abs().max()) / 200, rel=0.05)  # one token less
        assert v_scale == pytest.approx(float(cache.values.abs().max()) / 100, rel=0.05)


def calculated(model: Decoder, comm: Threads | None, folder: Path) -> torch.Tensor:
    found = resolved(folder, "auto")
    part: dict[str, Any] = {"model": model, "shard": model.shard, "comm": comm, "resolved": found}
    part |= {"device": CPU, "dtype": torch.float32}
    part["intermediate_tensors"] = torch.zeros(kv_scales.TOKENS, found.spec.hidden_size)
    return torch.tensor(kv_scales._calculated(cast(ModelEngine, SimpleNamespace(**part))))


def test_ranks_and_stages_find_the_scales_of_the_whole(tmp_path: Path) -> None:
    """Each rank those of its own heads; stages pass on what the tokens became."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, "intermediate_size": 96})
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    (whole,) = load_shards(tmp_path, 1, 1)
    expected = calculated(whole, None, tmp_path)
    ranks = together(load_shards(tmp_path, 2, 3), lambda model, comm: calculated(model, comm, tmp_path))
    by_rank = [torch.cat(ranks[rank::2]) for rank in range(2)]
    torch.testing.assert_close(torch.maximum(*by_rank), expected)
    assert not torch.equal(*by_rank)


def of_checkpoint(*given: tuple[float | None, float | None]) -> list[tuple[float, float]]:
    model = SimpleNamespace(kv_scales=lambda: list(given))
    shard = SimpleNamespace(layers=lambda count: range(3, 3 + len(given)))
    spec = SimpleNamespace(num_hidden_layers=9)
    made = SimpleNamespace(model=model, shard=shard, resolved=SimpleNamespace(spec=spec))
    return kv_scales._of_checkpoint(cast(ModelEngine, made))


def test_layers_without_scales_have_one_and_half_a_pair_is_refused() -> None:
    assert of_checkpoint((0.5, 0.25), (None, None)) == [(0.5, 0.25), (1.0, 1.0)]
    with pytest.raises(ProcessFatal, match=r"layers\.4\.self_attn\.v_scale: it is missing, and k_scale is there"):
        of_checkpoint((0.5, 0.25), (0.5, None))
    with pytest.raises(ProcessFatal, match=r"layers\.3\.self_attn\.k_scale: it is missing, and v_scale is there"):
        of_checkpoint((None, 2.0))


def test_what_is_too_large_is_stored_as_the_largest_number() -> None:
    x = torch.tensor([-3e5, -500.0, 0.3, 449.0, 3e5])
    assert float8.stored(x, 1.0, torch.float8_e4m3fn).float().tolist() == [-448, -448, 0.3125, 448, 448]
    assert float8.stored(x, 1.0, torch.float8_e5m2).float().tolist() == [-57344, -512, 0.3125, 448, 57344]
