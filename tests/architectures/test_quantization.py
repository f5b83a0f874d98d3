"""What is read of a quantization_config, and what is refused by name."""

from typing import Any

import pytest

from meshlm.architectures.quantization import formats, register, scheme_of

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
ARGUMENTS = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def compressed(weights: Any = ARGUMENTS, inputs: Any = None, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **changes}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2' is not supported; supported: e4m3"),
        ({**FP8, "activation_scheme": "weird"}, "activation_scheme 'weird'"),
        ({"quant_method": "fp8"}, "activation_scheme None"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size must be two positive integers"),
        ({**FP8, "weight_block_size": [128, 0]}, "weight_block_size must be two"),
        ({**FP8, "weight_block_size": [128, 128], "activation_scheme": "static"}, "goes with no weight_block_size"),
        ({**FP8, "scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0' is not supported"),
        ({**FP8, "ignored_layers": "lm_head"}, "ignored_layers must be a list of names"),
        (compressed(format="pack-quantized"), "format 'pack-quantized' is not supported; supported: float-quantized"),
        (compressed(config_groups=1), "config_groups must name groups"),
        (compressed(config_groups={"a": None}), "config_groups: a: it must be an object"),
        (compressed({**ARGUMENTS, "num_bits": 4}), "group_0: weights: num_bits 4 is not supported; supported: 8"),
        (compressed({**ARGUMENTS, "type": "int"}), "weights: type 'int'"),
        (compressed({**ARGUMENTS, "symmetric": False}), "weights: symmetric False"),
        (compressed({**ARGUMENTS, "strategy": "group", "group_size": 64}), "weights: group_size 64"),
        (compressed({**ARGUMENTS, "actorder": "group"}), "weights: actorder 'group'"),
        (compressed({**ARGUMENTS, "strategy": "token"}), "strategy 'token'"),
        (compressed(ARGUMENTS, {**ARGUMENTS, "strategy": "token"}), "strategy 'token' is supported where dynamic is true"),
        (compressed(ARGUMENTS, {**ARGUMENTS, "dynamic": "local"}), "dynamic 'local'"),
        (compressed(ARGUMENTS, {**ARGUMENTS, "strategy": "group", "dynamic": True}), "group_size 0 does not go"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (compressed(transform_config={"config_groups": {"a": 1}}), "transform_config"),
        (compressed(ignore=["re:("]), "ignore: 're:.' is no regular expression"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        formats()[str(config["quant_method"])].read(config)


@pytest.mark.parametrize(
    ("ignore", "module", "quantised"),
    [
        (["lm_head"], "model.layers.1.mlp.up_proj", True),
        (["model.layers.1.mlp"], "model.layers.1.mlp.up_proj", False),
        (["layers.1.mlp.up_proj"], "model.layers.1.mlp.up_proj", False),
        (["up_proj"], "model.layers.1.mlp.up_proj", False),
        (["model.layers.1"], "model.layers.11.mlp.up_proj", True),
        (["re:.*mlp.*"], "model.layers.1.mlp.up_proj", False),
        (["re:mlp"], "model.layers.1.mlp.up_proj", True),
    ],
)
def test_layers_that_are_not_quantised(ignore: list[str], module: str, quantised: bool) -> None:
    for config in ({**FP8, "modules_to_not_convert": ignore}, compressed(ignore=ignore)):
        spec = formats()[str(config["quant_method"])].read(config)
        assert (scheme_of(spec, module) is not None) == quantised


def test_the_first_group_that_has_a_layer_counts() -> None:
    first = {"targets": ["re:.*q_proj"], "weights": {**ARGUMENTS, "strategy": "channel"}}
    rest = {"targets": ["Linear"], "weights": ARGUMENTS}
    spec = formats()["compressed-tensors"].read(compressed(config_groups={"a": first, "b": rest}))
    found = [scheme_of(spec, name) for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")]
    assert [scheme.weight for scheme in found if scheme] == ["channel", "tensor"]


def test_two_of_one_name() -> None:
    with pytest.raises(ValueError, match="quantization fp8 is registered already"):
        register(formats()["fp8"])
