"""Files with weights: which are chosen, and what is refused before a process starts, in one line that names file and tensor."""

from pathlib import Path

import pytest
from model_folders import CONFIG, folder_with, resolve_model, safetensors

from meshlm.runtime.errors import ModelFilesError

INDEX = "model.safetensors.index.json"
TWO = {"model.safetensors": None, "a.safetensors": safetensors("x", "y"), "b.safetensors": safetensors("z")}


def indexed(**of: str) -> dict[str, object]:
    return {INDEX: {"weight_map": of}}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"config.json": {**CONFIG, "quantization_config": {"quant_method": "quip", "bits": 4}}},
            "quant_method 'quip'.; supported: quantization_config with fp8, .*, bitsandbytes, experts_int8, and GGUF files",
        ),
        (
            {"config.json": {**CONFIG, "quantization_config": {"quant_method": "fp8"}}},
            "config.json: quantization_config: quant_method fp8: activation_scheme None is not supported; supported: dynamic, static",
        ),
        ({"config.json": {**CONFIG, "quantization_config": {"bits": 3}}}, "quantization_config: .* quantised .bits 3"),
        (
            {"config.json": {**CONFIG, "quantization_config": "secret"}},
            "quantization_config: the weights are quantised",
        ),
        ({"config.json": {**CONFIG, "compression_config": {"format": "int"}}}, "compression_config: the weights"),
        ({"config.json": {**CONFIG, "quantization": {"bits": 4}}}, r"quantization: the weights are quantised \(bits 4"),
        (
            {
                "config.json": {
                    **CONFIG,
                    "quantization_config": {"quant_method": "compressed-tensors", "config_groups": 1},
                }
            },
            "compressed-tensors",
        ),
        ({"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}}, "hf_quant_config.json.*quant_algo 'FP8'"),
        ({"quantize_config.json": {"bits": 4}}, "quantize_config.json: the weights are quantised .bits 4"),
        ({"quant_config.json": {"w_bit": 4}}, "quant_config.json: the weights are quantised .w_bit 4"),
        ({"model.safetensors": safetensors("q", dtype="F8_E4M3")}, "tensor q is of type F8_E4M3; weights must be"),
        ({"model.safetensors": safetensors("q", "r", dtype="I8")}, r"tensor q is of type I8 \(and 1 more\)"),
        ({"model.safetensors": safetensors("q", dtype="U8")}, "type U8"),
        ({"model.safetensors": safetensors("q", dtype="I32")}, "type I32"),
        ({"model.safetensors": safetensors("q", dtype="BOOL")}, "type BOOL"),
        ({"model.safetensors": safetensors("q", dtype="C64")}, "type C64"),
        ({"model.safetensors": safetensors("q", dtype="F4")}, "type F4"),
        ({"model.safetensors": safetensors("x")[:-1]}, "model.safetensors: cannot be read, perhaps cut short"),
        ({"model.safetensors": b""}, "model.safetensors: cannot be read, perhaps cut short"),
        ({"model.safetensors": b"\xff" * 99}, "model.safetensors: cannot be read, perhaps cut short"),
        ({"model.safetensors": safetensors("x").replace(b'"dtype"', b'"dtyqe"')}, "cut short .'dtype'"),
        ({**TWO, "b.safetensors": safetensors("x")}, "b.safetensors: tensor x is in a.safetensors too"),
        ({**TWO, **indexed(x="a.safetensors", y="c.safetensors")}, "index.json: it lists c.safetensors is not there"),
        ({**TWO, **indexed(x="a.safetensors")}, "a.safetensors: it holds tensor y, which the index does not list"),
        (
            {**TWO, **indexed(x="a.safetensors", y="a.safetensors", z="a.safetensors")},
            "a.safetensors: it lacks tensor z, which the index lists",
        ),
        ({**TWO, **indexed(x="../a.safetensors")}, r"'\.\./a.safetensors' is no name of a file in this folder"),
        ({**TWO, INDEX: {"weight_map": []}}, "it has no weight_map"),
        ({"model.safetensors": None}, "no weights .*dummy runs without"),
        ({"model.safetensors": None, "training_args.bin": b"", "optimizer.pt": b""}, "no weights"),
        ({"model.safetensors": None, "consolidated.safetensors": safetensors("x")}, "in a format of their own"),
        ({"model.safetensors": None, "consolidated.00.pth": b""}, "in a format of their own"),
        (
            {"model.safetensors": None, "adapter_model.safetensors": safetensors("x"), "adapter_config.json": {}},
            "it holds an adapter",
        ),
    ],
)
def test_what_cannot_be_served_is_one_line(tmp_path: Path, files: dict[str, object], said: str) -> None:
    with pytest.raises(ModelFilesError, match=said) as told:
        resolve_model(folder_with(tmp_path, **files))
    assert str(tmp_path) in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("files", "asked", "chosen", "noted"),
    [
        ({}, "auto", "safetensors", ""),
        ({"pytorch_model.bin": b""}, "auto", "safetensors", "pytorch_model.bin is not read, model.safetensors is"),
        ({"pytorch_model.bin": b""}, "pt", "pt", ""),
        ({"model.safetensors": None, "pytorch_model.bin": b"", "training_args.bin": b""}, "auto", "pt", ""),
        ({"model.safetensors": None, "model.pt": b""}, "auto", "pt", ""),
        ({"consolidated.safetensors": safetensors("x")}, "auto", "safetensors", "consolidated.safetensors is not read"),
        ({"adapter_model.safetensors": b"", "training_args.bin": b""}, "auto", "safetensors", ""),
        ({**TWO, **indexed(z="b.safetensors")}, "auto", "safetensors", "a.safetensors is not read, b.safetensors is"),
    ],
)
def test_the_files_that_are_read(tmp_path: Path, files: dict[str, object], asked: str, chosen: str, noted: str) -> None:
    found = resolve_model(folder_with(tmp_path, **files), load_format=asked)
    assert found.load_format == chosen
    assert len(found.notes) == bool(noted)
    assert noted in "".join(found.notes)


@pytest.mark.parametrize("asked", ["safetensors", "gguf"])
def test_a_format_that_is_asked_for_and_not_there(tmp_path: Path, asked: str) -> None:
    folder = folder_with(tmp_path, **{"model.safetensors": None, "pytorch_model.bin": b""})
    with pytest.raises(ModelFilesError, match=f"--load-format {asked}: "):
        resolve_model(folder, load_format=asked)


@pytest.mark.parametrize(
    "files",
    [
        {"model.safetensors": safetensors("model.layers.0.self_attn.rotary_emb.inv_freq", dtype="I64")},
        {"model.safetensors": safetensors("layers.0.attn.masked_bias", dtype="BOOL")},
        {"model.safetensors": safetensors("x", dtype="F64")},
        {"config.json": {**CONFIG, "quantization_config": None}},
        {"hf_quant_config.json": {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}},
        {
            "config.json": {
                **CONFIG,
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {},
                    "kv_cache_scheme": {"num_bits": 8},
                },
            }
        },
    ],
)
def test_what_is_not_quantised(tmp_path: Path, files: dict[str, object]) -> None:
    assert resolve_model(folder_with(tmp_path, **files)).load_format == "safetensors"


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    folder = folder_with(tmp_path, **{"config.json": config, "model.safetensors": None})
    found = resolve_model(folder, load_format="dummy")
    assert found.load_format == "dummy"
    assert found.spec.quantization is not None
    assert "dummy weights are too" in found.notes[0]


@pytest.mark.parametrize(
    ("file", "settings", "said"),
    [
        ("config.json", {"quant_method": "fbgemm_fp8"}, r"quantised \(quant_method 'fbgemm_fp8'\); supported"),
        ("config.json", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method 'modelopt'"),
        ("config.json", {"quant_method": "torchao", "quant_type": {}}, "quant_method 'torchao'"),
        ("config.json", {"quant_method": "quark"}, "quant_method 'quark'"),
        ("config.json", {"quant_method": "fp8"}, "activation_scheme None is not supported"),
        (
            "config.json",
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"a": {}}},
            "format 'nvfp4-pack-quantized' is not supported",
        ),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "quant_algo 'NVFP4'"),
    ],
)
def test_dummy_weights_of_what_cannot_be_quantised_are_plain_only_by_demand(
    tmp_path: Path, file: str, settings: dict[str, object], said: str
) -> None:
    config = {**CONFIG, "quantization_config": settings} if file == "config.json" else CONFIG
    files: dict[str, object] = {"config.json": config, "model.safetensors": None}
    folder = folder_with(tmp_path, **(files | ({} if file == "config.json" else {file: settings})))
    with pytest.raises(ModelFilesError, match=rf"{said}.*quantization_config\": null"):
        resolve_model(folder, load_format="dummy")
    plain = resolve_model(folder, load_format="dummy", hf_overrides='{"quantization_config": null}')
    assert plain.spec.quantization is None
