"""Folders of adapters: what is read of them, and what is refused in one line that names file and fault."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from adapter_folders import QUERY, Tensors, folder_of, pair, zeros
from tiny_models import spec_of

from meshlm.protocol.config import ExpertConfig, MeshConfig, ParallelConfig
from meshlm.protocol.layers import MoESpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.adapter_experts import StackedExperts
from meshlm.runtime.model_files.adapter_files import Limits, adapter_of, read_adapter, why_not, wrong_name
from meshlm.runtime.model_files.adapter_modules import CONFIG
from meshlm.runtime.model_files.adapter_tensors import PICKLED, TENSORS

SPEC = spec_of(intermediate_size=16)
DOWN = "model.layers.0.mlp.down_proj"
GOOD = pair(QUERY, 4, 8, 8)


def test_modules_ranks_and_scales(tmp_path: Path) -> None:
    tensors = {**GOOD, **pair(DOWN, 2, 16, 8)}
    found = read_adapter(folder_of(tmp_path, tensors, alpha_pattern={"down_proj": 3}), SPEC, Limits(8))
    assert [(one.name, one.rank, one.scale, one.weights) for one in found.modules] == [
        (DOWN, 2, 1.5, (f"{DOWN}.weight",)),
        (QUERY, 4, 2.0, (f"{QUERY}.weight",)),
    ]
    (root, _) = read_adapter(folder_of(tmp_path, tensors, use_rslora=True), SPEC, Limits(8)).modules
    assert math.isclose(root.scale, 8 / math.sqrt(2))


def test_its_digest_is_what_its_files_hold(tmp_path: Path) -> None:
    first = adapter_of("a", folder_of(tmp_path / "first"), SPEC, Limits(8))
    again = adapter_of("b", folder_of(tmp_path / "second"), SPEC, Limits(8))
    others = [
        adapter_of("a", folder_of(tmp_path / "third", lora_alpha=9), SPEC, Limits(8)),
        adapter_of("a", folder_of(tmp_path / "fourth", {**GOOD, **pair(DOWN, 2, 16, 8)}), SPEC, Limits(8)),
    ]
    assert first.digest == again.digest
    assert len({one.digest for one in (first, *others)}) == 3


A, B = GOOD
VOCAB = SPEC.vocab_size
OUT, NORM = (f"base_model.model.model.layers.0.{name}" for name in ("self_attn.o_proj", "input_layernorm"))
TABLE, LM = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
ROWS = f"{TABLE}.token_adapter.trainable_tokens_delta"
MAGNITUDES = A.replace("lora_A.weight", "lora_magnitude_vector")
BAD: list[tuple[dict[str, Any], Tensors, str]] = [
    ({"peft_type": "IA3"}, GOOD, "peft_type is 'IA3'; LORA is what is read"),
    ({"use_dora": True}, GOOD, "q_proj has no lora_magnitude_vector, which use_dora needs"),
    ({}, {**GOOD, MAGNITUDES: zeros(8)}, "q_proj has magnitudes, and adapter_config.json does not say use_dora"),
    ({"use_dora": True}, {**GOOD, MAGNITUDES: zeros(9)}, r"has magnitudes \(9,\); for this model they must be \(8,\)"),
    ({"use_dora": True}, {**GOOD, MAGNITUDES: zeros(8, 1)}, r"vector is F32 \(8, 1\); a vector of floats"),
    ({"alora_invocation_tokens": []}, GOOD, "alora_invocation_tokens must be ids of the model's"),
    ({"alora_invocation_tokens": [VOCAB]}, GOOD, "alora_invocation_tokens must be ids of the model's"),
    ({"alora_invocation_tokens": "x"}, GOOD, "alora_invocation_tokens must be ids of the model's"),
    (
        {"alora_invocation_tokens": [5]},
        {**GOOD, f"{OUT}.weight": zeros(8, 8)},
        "alora_invocation_tokens: .*o_proj is not adapted by lora_A and lora_B alone",
    ),
    ({"bias": "all"}, GOOD, "bias is 'all'; none is what is read"),
    ({"init_lora_weights": "pissa"}, GOOD, "init_lora_weights is 'pissa', which changes the base's weights"),
    ({"lora_alpha": "much"}, GOOD, "lora_alpha or alpha_pattern is not read"),
    ({"alpha_pattern": {"(": 2}}, GOOD, "lora_alpha or alpha_pattern is not read"),
    ({}, {}, "it holds no tensor"),
    ({}, {A: GOOD[A]}, "q_proj has no lora_B"),
    ({}, {B: GOOD[B]}, "q_proj has no lora_A"),
    ({}, {**GOOD, "base_model.model.lm_head.weight": zeros(2, 2)}, r"lm_head has a weight \(2, 2\); .* must be \("),
    ({}, {**GOOD, f"{OUT}.weight": zeros(8, 8), f"{OUT}.bias": zeros(8)}, "o_proj was trained whole; .* no bias"),
    ({}, {**GOOD, f"{OUT}.bias": zeros(8)}, "o_proj has no lora_A"),
    ({}, {**GOOD, f"{NORM}.weight": zeros(8)}, "input_layernorm.weight is F32 .8,.; a matrix of floats is expected"),
    ({}, {**GOOD, f"{TABLE}.lora_embedding_A": zeros(2, VOCAB)}, "embed_tokens has no lora_embedding_B"),
    (
        {},
        {**GOOD, f"{TABLE}.lora_embedding_A": zeros(2, 7), f"{TABLE}.lora_embedding_B": zeros(8, 2)},
        "has A .2, 7. and B",
    ),
    ({}, {**GOOD, f"{OUT}.lora_embedding_A": zeros(2, 8)}, "o_proj has matrices of another kind of module"),
    (
        {"use_dora": True},
        {**pair("lm_head", 2, 8, VOCAB), f"{LM}.lora_magnitude_vector": zeros(VOCAB)},
        "DoRA of embeddings and heads",
    ),
    ({}, {**GOOD, ROWS: zeros(2, 8)}, "trainable_token_indices of adapter_config.json does not say which of the"),
    ({"trainable_token_indices": [1, VOCAB]}, {**GOOD, ROWS: zeros(2, 8)}, "does not say which of the"),
    ({"trainable_token_indices": [1, 1]}, {**GOOD, ROWS: zeros(2, 8)}, "does not say which of the"),
    ({"trainable_token_indices": {"lm_head": [1, 2]}}, {**GOOD, ROWS: zeros(2, 8)}, "does not say which of the"),
    (
        {"trainable_token_indices": [1]},
        {**GOOD, ROWS: zeros(2, 8)},
        r"has \(2, 8\) of tokens that were trained; .* \(1, 8\)",
    ),
    ({}, {**GOOD, f"{NORM}.what": zeros(8)}, "tensor .*what is no lora_A or lora_B of a module"),
    ({}, pair("model.layers.1.self_attn.q_proj", 4, 8, 8), "this model .LlamaForCausalLM. has no such module"),
    ({}, pair("model.layers.0.self_attn.w_proj", 4, 8, 8), "w_proj: this model .* has no such module"),
    ({}, pair("model.embed_tokens", 4, 8, VOCAB), "embed_tokens has matrices of another kind of module"),
    ({}, pair("lm_head", 4, 8, VOCAB + 1), "lm_head has A .4, 8. and B"),
    (
        {},
        pair(QUERY, 4, 16, 8),
        r"has A \(4, 16\) and B \(8, 4\); for this model they must be \(rank, 8\) and \(8, rank\)",
    ),
    ({}, {A: zeros(4, 8), B: zeros(8, 2)}, r"has A \(4, 8\) and B \(8, 2\)"),
    ({}, {A: zeros(0, 8), B: zeros(8, 0)}, r"has A \(0, 8\)"),
    ({}, {A: ("I32", (4, 8), bytes(128)), B: zeros(8, 4)}, "lora_A.weight is I32 .4, 8.; a matrix of floats"),
    ({}, {A: zeros(4, 8), B: zeros(8, 4, value=math.nan)}, "lora_B.weight has numbers that are not finite"),
    ({}, {A: ("BF16", (4, 8), b"\x80\x7f" * 32), B: zeros(8, 4)}, "lora_A.weight has numbers that are not finite"),
    ({}, pair(QUERY, 9, 8, 8), "q_proj has rank 9; --max-lora-rank is 8"),
    ({}, pair(DOWN, 2, 16, 8), "it changes down_proj, which --lora-target-modules does not name"),
]


@pytest.mark.parametrize(("config", "tensors", "said"), BAD)
def test_bad_adapters(config: dict[str, Any], tensors: Tensors, said: str, tmp_path: Path) -> None:
    limits = Limits(8, ("q_proj", "w_proj", "embed_tokens", "lm_head", "o_proj"))
    with pytest.raises(ModelFilesError, match=said) as error:
        read_adapter(folder_of(tmp_path, tensors, **config), SPEC, limits)
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


def test_files_that_are_not_there_or_cut_short(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="no such folder"):
        read_adapter(tmp_path / "none", SPEC, Limits(8))
    with pytest.raises(ModelFilesError, match=CONFIG):
        read_adapter(tmp_path, SPEC, Limits(8))
    folder = folder_of(tmp_path / "short")
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-1])
    with pytest.raises(ModelFilesError, match="cannot be read, perhaps cut short"):
        read_adapter(folder, SPEC, Limits(8))
    (folder / TENSORS).unlink()
    with pytest.raises(ModelFilesError, match=f"{TENSORS} is not there"):
        read_adapter(folder, SPEC, Limits(8))
    (folder / PICKLED).write_bytes(b"")
    with pytest.raises(
        ModelFilesError, match=r"adapter_model.bin: it is no file of torch.save's .*; plain tensors are read"
    ):
        read_adapter(folder, SPEC, Limits(8))


def test_a_pickle_of_plain_tensors_is_what_a_safetensors_file_is(tmp_path: Path) -> None:
    tensors = {**GOOD, **pair(DOWN, 2, 16, 8)}
    plain = read_adapter(folder_of(tmp_path / "plain", tensors), SPEC, Limits(8))
    folder = folder_of(tmp_path / "pickled", tensors)
    values = safetensors.torch.load_file(folder / TENSORS)
    torch.save(values, folder / PICKLED)
    assert read_adapter(folder, SPEC, Limits(8)).digest == plain.digest, (
        "a safetensors file is what is read, where there are both"
    )
    (folder / TENSORS).unlink()
    found = read_adapter(folder, SPEC, Limits(8))
    assert found.modules == plain.modules
    loaded = safetensors.torch.load(found.tensors)
    assert loaded.keys() == values.keys()
    assert all(torch.equal(loaded[name], values[name]) for name in values)
    for bad, said in (
        ({A: torch.full((4, 8), math.inf), B: torch.zeros(8, 4)}, "lora_A.weight has numbers that are not finite"),
        ({A: torch.zeros(4, 8).long(), B: torch.zeros(8, 4)}, "names torch.LongStorage"),
        ({A: Path("x")}, "adapter_model.bin: .*names pathlib"),
    ):
        torch.save(bad, folder / PICKLED)
        with pytest.raises(ModelFilesError, match=said):
            read_adapter(folder, SPEC, Limits(8))


def test_models_that_take_none() -> None:
    assert not why_not(SPEC)
    assert why_not(msgspec.structs.replace(SPEC, encoder_only=True))


def test_names() -> None:
    assert not wrong_name("team/sql-7b:v2")
    for name in ("", " a", "a\n", "x" * 257, "\x00"):
        assert wrong_name(name)


@pytest.mark.parametrize("device", ["cuda", "fake"])
def test_what_only_a_cpu_computes_is_refused_for_other_devices(device: str, tmp_path: Path) -> None:
    tensors = {**GOOD, "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": zeros(8, value=1.0)}
    folder = folder_of(tmp_path, tensors, use_dora=True)
    with pytest.raises(
        ModelFilesError, match=f"use_dora: DoRA is computed on --device cpu alone so far; this is --device {device}"
    ):
        read_adapter(folder, SPEC, Limits(8, device=device))
    assert read_adapter(folder_of(tmp_path / "plain"), SPEC, Limits(8, device=device)).modules


MIXED = spec_of(moe=MoESpec(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=6))
ALL, ONE = "model.layers.0.mlp.experts", "model.layers.0.mlp.experts.2.down_proj"


def of_all(module: str, rank: int, inputs: int, outputs: int) -> Tensors:
    return pair(module, 3 * rank, inputs, outputs)


def test_experts_are_found_by_names_and_sizes(tmp_path: Path) -> None:
    tensors = {**of_all(f"{ALL}.base_layer", 4, 8, 12), **of_all(ALL, 2, 6, 8)}
    folder = folder_of(tmp_path, tensors, target_parameters=["x"], alpha_pattern={"experts.down_proj": 6})
    found = read_adapter(folder, MIXED, Limits(4, ("experts",))).modules
    assert [(one.name, one.rank, one.scale, len(one.weights)) for one in found] == [
        (f"{ALL}.down_proj", 2, 3.0, 3),
        (f"{ALL}.gate_up_proj", 4, 2.0, 6),
    ]
    assert found[1].weights[:3] == tuple(f"{ALL}.{name}.weight" for name in ("0.gate_proj", "0.up_proj", "1.gate_proj"))
    assert all(one.experts == StackedExperts(3) for one in found)
    (swapped,) = read_adapter(folder_of(tmp_path / "b", of_all(ALL, 1, 12, 8)), MIXED, Limits(1)).modules
    assert swapped.experts == StackedExperts(3, is_swapped=True)
    (single,) = read_adapter(folder_of(tmp_path / "c", pair(ONE, 4, 6, 8)), MIXED, Limits(4, ("down_proj",))).modules
    assert (single.weights, single.experts) == ((f"{ONE}.weight",), StackedExperts(1))


BAD_EXPERTS: list[tuple[dict[str, Any], Tensors, str]] = [
    ({}, pair(ALL, 4, 8, 12), r"has \(4, 8\) and \(12, 4\); .* \(3 rank, 8\) and \(12, 3 rank\) or \(3 rank, 6\)"),
    ({}, of_all(ALL, 4, 8, 13), r"has \(12, 8\) and \(13, 12\); for this model they must be"),
    ({}, of_all(ALL, 9, 8, 12), "experts.gate_up_proj has rank 9; --max-lora-rank is 8"),
    ({}, pair(ONE, 4, 6, 9), r"2.down_proj has A \(4, 6\) and B \(9, 4\)"),
    ({}, pair(ONE.replace("2", "3"), 4, 6, 8), "no such module, or none that adapters change"),
    ({}, of_all(ALL.replace("0", "1"), 4, 8, 12), "no such module"),
    ({"use_dora": True}, pair(ONE, 4, 6, 8), "DoRA of experts is not there"),
    ({}, {f"base_model.model.{ONE}.weight": zeros(8, 6)}, "experts are adapted by lora_A and lora_B alone"),
    ({"alora_invocation_tokens": [5]}, pair(ONE, 4, 6, 8), "2.down_proj is of experts; aLoRA takes linear layers"),
]


@pytest.mark.parametrize(("config", "tensors", "said"), BAD_EXPERTS)
def test_bad_adapters_of_experts(config: dict[str, Any], tensors: Tensors, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=said):
        read_adapter(folder_of(tmp_path, tensors, **config), MIXED, Limits(8))


@pytest.mark.parametrize("tensors", [of_all(ALL, 4, 8, 12), pair(ONE, 4, 6, 8)])
def test_where_experts_are_not_adapted(tensors: Tensors, tmp_path: Path) -> None:
    folder, other = folder_of(tmp_path, tensors), folder_of(tmp_path / "query")
    shared = ExpertConfig(enable_expert_parallel=True)
    together = MeshConfig(experts=shared, parallel=ParallelConfig(data_parallel_size=2))
    moving = MeshConfig(experts=msgspec.structs.replace(shared, enable_eplb=True))
    for config, device, said in (
        (MeshConfig(), "cuda", "on --device cpu alone so far; this is --device cuda"),
        (together, "cpu", "ranks whose experts step together .* have no adapters of experts"),
        (moving, "cpu", "experts that move between ranks .--enable-eplb. have no adapters"),
    ):
        with pytest.raises(ModelFilesError, match=said):
            read_adapter(folder, MIXED, Limits.of(config, device))
        assert read_adapter(other, MIXED, Limits.of(config, device)).modules
