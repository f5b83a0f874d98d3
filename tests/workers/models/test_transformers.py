"""Models that transformers computes with our attention: transformers' own greedy tokens, whatever becomes of a request on its way."""

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import served_engines
import torch
import torch.nn.functional as F
import transformers
from model_folders import resolve_model
from safetensors.torch import save_file
from served_engines import AGAIN, Engines, made, served
from small_models import BLOCK, CPU, SMALL, batch_of, caches, resolved_of_files

from meshlm.architectures.layers import with_attention
from meshlm.protocol.config import ParallelConfig, Resolved
from meshlm.protocol.model import ModelSpec, TransformersSpec
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.runtime.model_files import transformers_models
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings.parallel import check
from meshlm.workers.attention.torch_backend import TorchAttention
from meshlm.workers.batch import VECTOR
from meshlm.workers.distributed.communicator import SINGLE_RANK
from meshlm.workers.models.transformers import load
from meshlm.workers.models.transformers.look import look
from meshlm.workers.models.transformers.model import TransformersModel
from meshlm.workers.weights.load import load_model

LAYERS = {"num_hidden_layers": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("GraniteConfig", LAYERS | {"attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "vaultgemma": (
        "VaultGemmaConfig",
        LAYERS | {"head_dim": 16, "sliding_window": 11, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gpt-oss": (
        "GptOssConfig",
        LAYERS | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 11},
    ),
    "minicpm3": ("MiniCPM3Config", LAYERS | {"num_key_value_heads": 6, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}),
}
"""Scales and a tied head; windows in every other layer and both caps; sinks; values that are shorter than keys."""


def in_this_process(config: dict[str, Any], folder: Path, code: transformers_models.RemoteCode) -> ModelSpec:
    """A process of its own imports torch again, which takes seconds."""
    return look(transformers_models.source_of(config, code), folder).spec


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_models, "describe", in_this_process)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_transformers_own(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, in too little memory, and behind what an earlier request left."""
    monkeypatch.setattr(served_engines, "OUTPUT", 10)
    expected = made(CASES[case], tmp_path)
    engines = Engines(tmp_path, 24, "auto", model_impl="transformers")
    try:
        bench = served(engines)
    finally:
        engines.close()
    assert bench.tokens == expected.greedy(bench.tokens)
    assert bench.core.batching.num_preemptions > 0, "memory was to be too little"
    assert bench.cached[AGAIN[-1]] >= 48, "too little was found in the prefix cache"


ARCEE: tuple[str, dict[str, Any]] = ("ArceeConfig", LAYERS | {"mlp_bias": True, "attention_bias": True})
GRANITE = ("GraniteConfig", {"num_hidden_layers": 4, "embedding_multiplier": 7.0, "residual_multiplier": 0.5})


@pytest.mark.parametrize(
    ("case", "tp", "pp"), [(ARCEE, 2, 1), (ARCEE, 2, 2), (GRANITE, 1, 2), (GRANITE, 1, 4), (CASES["vaultgemma"], 1, 2)]
)
def test_tokens_of_several_ranks(
    case: tuple[str, dict[str, Any]], tp: int, pp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the plans of the configuration: some products by rows, others by columns; layers in stages, also where embeddings are scaled
    and windows slide in some layers."""
    monkeypatch.setattr(served_engines, "OUTPUT", 4)
    monkeypatch.setattr(served_engines, "PROMPTS", served_engines.PROMPTS[-2:])
    expected = made(case, tmp_path)
    # While transformers loads a model it changes torch for all threads, its default dtype too: one at a time, and nothing beside it.
    lock, loaded, alone = threading.Lock(), threading.Barrier(tp * pp, timeout=60), load.load_transformers

    def in_turns(*arguments: Any) -> TransformersModel:
        with lock:
            model = alone(*arguments)
        loaded.wait()
        return model

    monkeypatch.setattr(load, "load_transformers", in_turns)
    engines = Engines(tmp_path, 60, "auto", tp=tp, pp=pp, model_impl="transformers")
    try:
        assert engines.engines[0].spec.num_attention_heads == 6 // tp
        weights = [sum(part.numel() for part in engine.model.parameters()) for engine in engines.engines]
        found = served(engines, pp).tokens
        assert found == expected.greedy(found)
    finally:
        engines.close()
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(weights) < tp * pp * sum(part.numel() for part in whole.parameters()), "nothing was split"


def resolved(folder: Path, load_format: str = "auto") -> Resolved:
    return resolved_of_files(resolve_model(str(folder), load_format=load_format, model_impl="transformers"))


def config_of(name: str, **extra: Any) -> dict[str, Any]:
    """The config.json of a small model of transformers' class."""
    config = getattr(transformers, f"{name}Config")(**SMALL | LAYERS | extra)
    made = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [made.__name__]}
    return found


LONG = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "states": ("Rwkv", {}, {}, "keeps recurrent states"),
    "convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, {}, "layer_types has conv; there are"),
    "biases by position": ("Bloom", {}, {}, "does not attend through transformers' attention interface"),
    "no interface": ("GPTJ", {"rotary_dim": 8}, {}, "does not attend through transformers' attention interface"),
    "several calls": ("DiffLlama", {}, {}, "a layer of it attends several times"),
    "chunks": ("Granite", {}, {"layer_types": ["chunked_attention"] * 2}, "layer_types has chunked_attention; there"),
    "a short context": ("Granite", {"max_position_embeddings": 23}, {}, "max_position_embeddings 23: its context must"),
    "rope of the batch": ("Granite", {"rope_parameters": LONG}, {}, "rope_type dynamic: .* the requests beside it"),
    "no decoder": ("Granite", {}, {"model_type": "vit"}, "no causal decoder of model_type 'vit'"),
    "unknown": ("Granite", {}, {"model_type": "none"}, "knows no model_type 'none'"),
    "its own code": (
        "Granite",
        {},
        {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}},
        r"only code that comes with the model \(auto_map own.Own\) knows it; --trust-remote-code",
    ),
    "another class": ("Granite", {}, {"architectures": ["OtherForCausalLM"]}, "is GraniteForCausalLM"),
    "a bad key": ("Granite", {}, {"hidden_size": "wide"}, "transformers refuses its config.json"),
}
"""transformers' class, what its configuration gets, what is other in the file, and the refusal."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_our_attention_cannot_do_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, extra, changes, reason = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(config_of(name, **extra) | changes))
    with pytest.raises(ModelFilesError, match=reason):
        resolve_model(str(tmp_path), load_format="dummy", model_impl="transformers")


@pytest.mark.parametrize(
    ("name", "extra", "reason"),
    [
        ("Arcee", {}, ""),
        ("GPTNeoX", {"num_attention_heads": 4}, ""),
        ("GPTBigCode", {"num_key_value_heads": 1}, "its configuration has no base_model_tp_plan"),
        ("Olmoe", {"num_experts": 8}, "base_model_tp_plan has the style colwise_gather_output for layers."),
        ("Youtu", {"num_key_value_heads": 6}, "base_model_tp_plan leaves attention whole"),
        ("Arcee", {"num_key_value_heads": 1}, "it has one key-value head"),
    ],
)
def test_ranks_split_what_the_plan_splits(name: str, extra: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(name, **extra)))
    spec = resolved(tmp_path, "dummy").spec
    assert spec.transformers is not None
    assert spec.transformers.not_split.startswith(reason)
    assert bool(spec.transformers.not_split) == bool(reason)
    if reason:
        with pytest.raises(UsageError, match=f"--tensor-parallel-size 2: {name}ForCausalLM: {reason}"):
            check(ParallelConfig(tensor_parallel_size=2), spec, "cpu", 2)


@pytest.mark.parametrize(
    ("name", "plan", "reason"),
    [
        ("Arcee", ..., ""),
        ("GPTBigCode", ..., "its configuration has no base_model_pp_plan"),
        ("Arcee", {"blocks": (["hidden_states"], ["hidden_states"])}, "base_model_pp_plan does not name its layers"),
        (
            "Arcee",
            {"layers": (["hidden_states", "per_layer"], ["hidden_states"])},
            "base_model_pp_plan: its layers need",
        ),
        (
            "Arcee",
            {"layers": (["hidden_states"], ["hidden_states"]), "last": ([], [])},
            "base_model_pp_plan names last, which it does not have",
        ),
    ],
)
def test_stages_are_what_the_plan_says(
    name: str, plan: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plan is not ...:
        monkeypatch.setattr(getattr(transformers, f"{name}Config"), "base_model_pp_plan", plan)
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)))
    spec = resolved(tmp_path, "dummy").spec
    assert spec.transformers is not None
    assert spec.transformers.not_staged.startswith(reason)
    assert bool(spec.transformers.not_staged) == bool(reason)
    if reason:
        with pytest.raises(UsageError, match=f"--pipeline-parallel-size 2: {name}ForCausalLM: {reason}"):
            check(ParallelConfig(pipeline_parallel_size=2), spec, "cpu", 2)
    else:
        check(ParallelConfig(pipeline_parallel_size=2), spec, "cpu", 2)


def test_other_states_than_with_transformers_attention_end_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that looking did not find, positions that are not the given ones: nothing is served then."""
    (tmp_path / "config.json").write_text(
        json.dumps(config_of("VaultGemma", head_dim=16, sliding_window=11, initializer_range=0.3))
    )
    found = resolved(tmp_path, "dummy")
    with torch.inference_mode():
        load_model(found, CPU, 0, lambda done, total: None).join(SINGLE_RANK)
        blind = msgspec.structs.replace(found, spec=with_attention(found.spec, sliding_window=0))
        with pytest.raises(ProcessFatal, match=r"VaultGemmaForCausalLM gives with our attention other states .* piece"):
            load_model(blind, CPU, 0, lambda done, total: None).join(SINGLE_RANK)
        shifted = load_model(found, CPU, 0, lambda done, total: None)
        assert isinstance(shifted, TransformersModel)
        forward = shifted.base.forward
        monkeypatch.setattr(
            shifted.base,
            "forward",
            lambda position_ids, **rest: forward(position_ids=position_ids - position_ids[:, :1], **rest),
        )
        with pytest.raises(ProcessFatal, match=r"its second piece are .* apart"):
            shifted.join(SINGLE_RANK)


def test_tensors_that_are_not_the_models_end_the_start(tmp_path: Path) -> None:
    config = config_of("Granite", tie_word_embeddings=False)
    model = transformers.GraniteForCausalLM(transformers.GraniteConfig.from_dict(config))
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for changes, reason in (
        ({"lm_head.weight": None}, "1 tensor missing: lm_head.weight"),
        ({"model.layers.0.more.weight": torch.ones(2)}, "1 tensor that the model does not have: model.layers.0.more.w"),
        ({"model.norm.weight": torch.full((48,), torch.nan)}, "NaN or infinity"),
        ({"model.norm.weight": torch.ones(4)}, "model.norm.weight"),
    ):
        changed = {name: value for name, value in (weights | changes).items() if value is not None}
        save_file(changed, tmp_path / "model.safetensors")
        with torch.inference_mode(), pytest.raises(ProcessFatal, match=reason):
            load_model(resolved(tmp_path), CPU, 0, lambda done, total: None)


def test_vectors_that_come_with_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("Granite")))
    with torch.inference_mode():
        model = load_model(resolved(tmp_path, "dummy"), CPU, 0, lambda done, total: None)
        assert isinstance(model, TransformersModel)
        batch = batch_of([([5, 6, 7, 8], 0, [0])])
        rows = model.base.get_input_embeddings()(torch.tensor([6, 7]))
        given = dataclasses.replace(
            batch, input_ids=torch.tensor([5, VECTOR, VECTOR, 8]), vectors=F.pad(rows, (0, 0, 1, 1))
        )
        states = [model(one, caches(model.spec, 1), TorchAttention(one, BLOCK)) for one in (batch, given)]
    torch.testing.assert_close(*states)


def test_code_of_another_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def from_hub(name: str, folder: str, code_revision: str | None) -> None:
        asked.append((name, code_revision))
        raise OSError("no hub here")

    monkeypatch.setattr("transformers.dynamic_module_utils.get_class_from_dynamic_module", from_hub)
    config = config_of("Granite") | {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    for repository, name in (("a/b", "a/b--own.OwnConfig"), ("", "own.OwnConfig")):
        source = TransformersSpec(
            architecture="Own",
            config=json.dumps(config),
            trust_remote_code=True,
            repository=repository,
            code_revision=repository and "v2",
        )
        with pytest.raises(ModelFilesError, match=r"cannot be loaded \(OSError: no hub here\)"):
            look(source, tmp_path)
        assert asked.pop() == (name, "v2" if repository else None)


def test_code_of_the_model_runs_where_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own.py").write_text(
        "from transformers import GraniteConfig, GraniteForCausalLM\n\n\n"
        "class OwnConfig(GraniteConfig):\n    model_type = 'own'\n\n\n"
        "class OwnForCausalLM(GraniteForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = config_of("Granite") | {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    named = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": named}))
    with pytest.raises(ModelFilesError, match=r"OwnForCausalLM is not supported; .* --trust-remote-code runs that"):
        resolve_model(str(folder), load_format="dummy")
    files = resolve_model(str(folder), load_format="dummy", trust_remote_code=True)
    assert "OwnForCausalLM is computed by transformers' model with our attention" in files.notes[0]
    with torch.inference_mode():
        load_model(resolved_of_files(files), CPU, 0, lambda done, total: None).join(SINGLE_RANK)
