"""Our models against transformers: the same weights, the same logits; SmolLM2's greedy tokens."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from gguf_models import write_gguf
from model_folders import resolve_model
from small_models import CLASSIC, DEEPSEEK, DENSE, GEMMA, GEMMA3N, GEMMA4, MOE, SMALL, caches, load, run
from tiny_models import spec_of, unrotated

from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.workers.layers import cpu_ops
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.models.compiled import SHAPES, CompiledLayers, use_cache
from meshlm.workers.models.cpu_layers import fuse_decoder
from meshlm.workers.models.decoder import Decoder, LayerClasses
from meshlm.workers.weights.sources import sources

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
BY_KIND = {"full_attention": {**LINEAR, "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 300.0}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "llama-gelu": ("LlamaConfig", {"hidden_act": "gelu"}),
    "llama-gelu-tanh": ("LlamaConfig", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "phi3": (
        "Phi3Config",
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.75}, "sliding_window": 7},
    ),
    "gemma": ("GemmaConfig", {"head_dim": 16, "hidden_act": "gelu", "initializer_range": 0.2}),
    "gemma2": ("Gemma2Config", GEMMA | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7}),
    "vaultgemma": ("VaultGemmaConfig", GEMMA | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7}),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"num_hidden_layers": 7}),
    **DENSE,
    **MOE,
    **DEEPSEEK,
    "gemma3n": ("Gemma3nTextConfig", GEMMA3N),
    **GEMMA4,
    "gemma3-linear": ("Gemma3TextConfig", GEMMA | {"layer_types": MIXED, "rope_parameters": BY_KIND}),
}


SLOPES = ("mpt", "falcon-rw")


@pytest.mark.parametrize("case", [*CASES, *CLASSIC])
def test_logits_equal_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompt, then in chunks, then decode beside another request: all the same logits, by each way to compute on a CPU."""
    import transformers
    from transformers.models.bloom import modeling_bloom
    from transformers.models.falcon import modeling_falcon

    torch.manual_seed(0)
    name, extra = (CASES | CLASSIC)[case]
    config = getattr(transformers, name)(**{**SMALL, **extra})
    attention = "eager"
    if case == "falcon-rw":  # transformers rounds its biases to bfloat16, and eagerly it forgets the mask beside them
        monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", modeling_bloom.build_alibi_tensor)
        attention = "sdpa"
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval().float()
    for parameter_name, parameter in theirs.named_parameters():
        if parameter.dim() == 1 or parameter_name.endswith("bias"):  # norms, biases and sinks
            parameter.data += torch.randn_like(parameter) * 0.3
    for buffer_name, buffer in theirs.named_buffers():
        if buffer_name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
            buffer += torch.randn_like(buffer) * 0.3
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(0, 211, (37,)).tolist()
    other = torch.randint(0, 211, (11,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
        expected_other = theirs(torch.tensor([other])).logits[0]
    compare(load(tmp_path), (tokens, expected), (other, expected_other))
    if case in CASES:
        ours = load(tmp_path)
        fuse_decoder(ours, "cpu")
        assert (ours.executor is None) == (
            ours.classes != LayerClasses() or ours.spec.moe is not None or any(unrotated(ours.spec))
        )
        if ours.executor is not None:
            compare(ours, (tokens, expected), (other, expected_other))
    if case in (*CASES, *SLOPES):
        monkeypatch.setattr(cpu_ops, "available", lambda: False)
        ours = load(tmp_path)
        assert isinstance(ours.ops, TorchOps)
        compare(ours, (tokens, expected), (other, expected_other))


def compare(ours: Decoder, prompt: tuple[list[int], torch.Tensor], beside: tuple[list[int], torch.Tensor]) -> None:
    """With the logits of a prompt, and of another beside it."""
    (tokens, expected), (other, expected_other) = prompt, beside
    table, table_other = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4], [20, 21, 22]
    whole = run(ours, caches(ours.spec, 24), [(tokens, 0, table)])
    torch.testing.assert_close(whole, expected, atol=2e-5, rtol=1e-4)
    kv = caches(ours.spec, 24)
    first = run(ours, kv, [(tokens[:9], 0, table), (other[:10], 0, table_other)])
    second = run(ours, kv, [(other[10:], 10, table_other), (tokens[9:36], 9, table)])
    third = run(ours, kv, [(tokens[36:], 36, table)])
    mine = torch.cat((first[:9], second[1:], third))
    torch.testing.assert_close(mine, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat((first[9:], second[:1])), expected_other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama-tied", "mistral", "qwen3"])
def test_parts_between_attention_calls_are_the_same_model(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What --compile inductor compiles, not compiled."""
    import transformers

    torch.manual_seed(0)
    name, extra = CASES[case]
    transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**SMALL, **extra})).save_pretrained(
        tmp_path
    )
    monkeypatch.setattr(cpu_ops, "available", lambda: False)
    model = load(tmp_path)
    tokens, table = torch.randint(0, 211, (21,)).tolist(), [7, 3, 11, 0, 5, 9]
    expected = run(model, caches(model.spec, 12), [(tokens, 0, table)])
    model.executor = CompiledLayers(model.spec, lambda part, **options: part)
    kv = caches(model.spec, 12)
    found = torch.cat([run(model, kv, [(tokens[:20], 0, table)]), run(model, kv, [(tokens[20:], 20, table)])])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("shapes", list(SHAPES))
def test_one_compiled_function_is_for_any_number_of_tokens(shapes: str) -> None:
    """In each of --compile-dynamic-shapes: a step of another size, from 2 up, compiles nothing."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, weight = CompileCounter(), torch.randn(4, 3)

    def part(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight).relu() + 1

    compiled = torch.compile(part, backend=counter, fullgraph=True, dynamic=False)
    try:
        for size in (2, 3, 7):
            x = torch.randn(size, 3)
            torch.testing.assert_close(compiled(SHAPES[shapes](x)), part(x))
    finally:
        config: Any = torch.fx.experimental._config
        config.backed_size_oblivious = False
        torch._dynamo.reset()
    assert counter.frame_count == 1


def test_the_compilers_cache_is_of_one_model_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "before")
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "architectures": ["LlamaForCausalLM"]}))
    spec = resolve_model(str(tmp_path), load_format="dummy").spec
    one = use_cache(spec, torch.bfloat16, tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(one)
    assert use_cache(spec, torch.bfloat16, tmp_path) == one
    assert use_cache(spec, torch.float16, tmp_path) != one
    assert use_cache(msgspec.structs.replace(spec, hidden_size=96), torch.bfloat16, tmp_path) != one


def test_bin_weights_and_sharded_safetensors(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    one, sharded, pickled = tmp_path / "one", tmp_path / "sharded", tmp_path / "bin"
    theirs.save_pretrained(one)
    theirs.save_pretrained(sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    pickled.mkdir()
    (pickled / "config.json").write_text((one / "config.json").read_text())
    torch.save(theirs.state_dict(), pickled / "pytorch_model.bin")
    tokens = [1, 2, 3, 4, 5]
    logits = [run(model, caches(model.spec, 4), [(tokens, 0, [1, 2])]) for model in map(load, (one, sharded, pickled))]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_truncated_safetensors_is_named(tmp_path: Path) -> None:
    import transformers

    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelFilesError, match=r"model\.safetensors.*cut short"):
        load(tmp_path)


def test_all_files_are_looked_at_before_the_first_is_read(tmp_path: Path) -> None:
    """A large model's last file would else be reached after minutes, again each time the worker starts."""
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    last = max(tmp_path.glob("*.safetensors"))
    spec = resolve_model(str(tmp_path)).spec
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(ModelFilesError, match=f"{last.name}.*cut short"):
        resolve_model(str(tmp_path))
    with pytest.raises(ProcessFatal, match=f"{last.name}.*cut short"):
        next(sources(tmp_path, "safetensors", spec, torch.device("cpu"), 0))


def test_all_tensors_of_a_gguf_file_are_held_against_its_size_before_the_first_is_read(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, {})
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(ProcessFatal, match=f"{file.name}.*cut short"):
        next(sources(file, "gguf", resolve_model(str(file)).spec, torch.device("cpu"), 0))


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_unsupported_architecture_is_named_beside_those_near_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodyForCausalLM"]}))
    with pytest.raises(ModelFilesError, match=r"NobodyForCausalLM is not supported; near it: \w+ForCausalLM"):
        resolve_model(str(tmp_path), load_format="dummy")


def test_dummy_weights_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "architectures": ["LlamaForCausalLM"]}))
    first, second = load(tmp_path, "dummy"), load(tmp_path, "dummy")
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("sliding", "count"), [((), 2), ((True,) * 4, 2), ((False, True, False, True), 2), ((True, True, True, False), 4)]
)
def test_a_shortened_model_has_every_kind_of_layer(sliding: tuple[bool, ...], count: int) -> None:
    """And is whole again afterwards, whatever happens meanwhile."""
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    spec = spec_of(
        architecture="m",
        vocab_size=9,
        num_hidden_layers=4,
        max_position_embeddings=16,
        sliding_window=7 if sliding else 0,
        sliding_layers=sliding,
        **sizes,
    )
    model = Decoder(spec, 16)
    whole = list(model.layers)

    def fail() -> None:
        with model.shortened() as layers:
            assert layers == count
            assert list(model.layers) == whole[:count]
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert list(model.layers) == whole
