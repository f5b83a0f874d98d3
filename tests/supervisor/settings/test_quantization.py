"""--quantization may only say what the weights are."""

from pathlib import Path
from typing import Any

import pytest
from model_folders import CONFIG, folder_with, resolve_model

from meshlm.protocol.config import Resolved
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, quantization, resolve

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def resolved(folder: Path, written: Any, **settings: Any) -> Resolved:
    model = folder_with(folder, **{"config.json": {**CONFIG, "quantization_config": written}})
    found = resolve.resolve(flags.build({"model": model, "device": "cpu", **settings}, None)).resolved
    assert found is not None
    return found


@pytest.mark.parametrize("asked", ["", "fp8"])
def test_what_the_files_say(asked: str, tmp_path: Path) -> None:
    spec = resolved(tmp_path, FP8, quantization=asked).spec
    assert spec.quantization is not None
    assert spec.quantization.method == "fp8"


@pytest.mark.parametrize(
    ("found", "asked", "said"),
    [
        (FP8, "compressed-tensors", "--quantization compressed-tensors: the weights of .* are quantised with fp8"),
        (
            None,
            "awq",
            "--quantization awq: the weights of .* are not quantised; while they are loaded they can be with .*fp8",
        ),
        (None, "magic", "--quantization magic: the weights of .* are not quantised"),
    ],
)
def test_what_they_are_not(found: Any, asked: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        resolved(tmp_path, found, quantization=asked)


def test_plain_weights_are_quantised_while_they_are_loaded(tmp_path: Path) -> None:
    spec = resolved(tmp_path, None, quantization="fp8").spec
    assert spec.quantization is not None
    assert [(scheme.weight, scheme.online) for scheme in spec.quantization.schemes] == [("channel", True)]
    with pytest.raises(UsageError, match="--compile inductor: it is not there for weights quantised with fp8"):
        resolved(tmp_path, None, quantization="fp8", device="cuda", compile="inductor")


def test_forms_of_weights_are_of_gguf_files(smollm2: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--gguf-weights packed: .* is no \.gguf file; leave it out"):
        resolved(tmp_path, None, gguf_weights="packed")
    compiled: dict[str, object] = {"model": str(smollm2), "device": "cuda", "compile": "inductor"}
    with pytest.raises(UsageError, match=r"--compile inductor: it needs --gguf-weights decoded for a \.gguf file"):
        resolve.resolve(flags.build(compiled, None))
    assert resolve.resolve(flags.build({**compiled, "gguf_weights": "decoded"}, None)).resolved is not None


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def test_decoded_copies_are_of_packed_weights_on_a_gpu(smollm2: Path, tmp_path: Path) -> None:
    assert resolved(tmp_path / "awq", AWQ, device="cuda", decoded_copy="always").spec.quantization is not None
    with pytest.raises(UsageError, match="--decoded-copy never: it is for a GPU, not for --device cpu; leave it out"):
        resolved(tmp_path / "awq", AWQ, decoded_copy="never")
    for name, written in (("plain", None), ("fp8", FP8)):
        with pytest.raises(UsageError, match=r"--decoded-copy always: no weights of .* are packed; leave it out"):
            resolved(tmp_path / name, written, device="cuda", decoded_copy="always")
    asked: dict[str, object] = {"model": str(smollm2), "device": "cuda", "decoded_copy": "always"}
    with pytest.raises(UsageError, match=r"--decoded-copy always: weights of a \.gguf file take --gguf-weights"):
        resolve.resolve(flags.build(asked, None))


def test_exact_products_are_of_cpus(smollm2: Path) -> None:
    asked: dict[str, object] = {"model": str(smollm2), "device": "cpu", "cpu_exact": True}
    assert resolve.resolve(flags.build(asked, None)).model.cpu_exact
    with pytest.raises(UsageError, match="--cpu-exact: it is for products on a CPU, not for --device fake"):
        resolve.resolve(flags.build({**asked, "device": "fake"}, None))


def test_compiled_functions_know_no_scales(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--compile inductor: it is not there for weights quantised with fp8"):
        resolved(tmp_path, FP8, device="cuda", compile="inductor")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "it needs a GPU, not --device cpu"),
        ({"device": "cuda", "compile": "inductor"}, "--compile inductor runs no layers"),
    ],
)
def test_layers_have_ranges_where_there_are_layers_and_a_gpu(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"--profile-layers: {said}"):
        resolved(tmp_path, None, profile_layers=True, **changed)


MIXTRAL = {
    **CONFIG,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
_EIGHT = {"num_bits": 8, "type": "int"}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_EIGHT, "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {**_EIGHT, "strategy": "token", "dynamic": True, "symmetric": False},
        }
    },
}
SHARED = {"device": "cuda", "enable_expert_parallel": True, "data_parallel_size": 2, "all2all_backend": "peer_memory"}


@pytest.mark.parametrize(
    ("written", "settings", "said"),
    [
        (FP8, SHARED, "--all2all-backend peer_memory: it sends no 8-bit activations"),
        (None, {**SHARED, "quantization": "fp8"}, "--all2all-backend peer_memory: it sends no 8-bit activations"),
        (INT8, {}, "experts.0.w1 is an expert's; activations with zero points are not supported"),
        (
            {**FP8, "activation_scheme": "static"},
            {"load_format": "auto", "enable_expert_parallel": True, "data_parallel_size": 2, "enable_eplb": True},
            "--enable-eplb: .*experts.0.w1 has an activation scale in the file",
        ),
    ],
)
def test_experts_are_refused_before_anything_is_loaded(
    written: Any, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = folder_with(tmp_path, **{"config.json": {**MIXTRAL, "quantization_config": written}})
    with pytest.raises(UsageError, match=said):
        resolve.resolve(flags.build({"device": "cpu", "load_format": "dummy", **settings, "model": model}, None))


@pytest.mark.parametrize(
    ("written", "changed"),
    [
        (FP8, {"all2all_backend": "all_to_all"}),
        (FP8, {"data_parallel_size": 1}),
        (None, {}),
        (GPTQ, {"quantization": "gptq"}),
        (GPTQ, {"quantization": "gptq_marlin"}),
        (GPTQ, {"quantization": "marlin"}),
    ],
)
def test_what_experts_may_have(written: Any, changed: dict[str, Any], tmp_path: Path) -> None:
    model = folder_with(tmp_path, **{"config.json": {**MIXTRAL, "quantization_config": written}})
    files = resolve_model(model, load_format="dummy")
    assert quantization.as_asked(flags.build({**SHARED, **changed, "model": model}, None), files) is files
