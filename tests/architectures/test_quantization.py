"""What is read of a quantization_config, and what is refused by name."""

import contextlib
from typing import Any

import pytest

from meshlm.architectures import packed_quantization, quantization
from meshlm.architectures.config_values import words
from meshlm.architectures.quantization import formats, register, scheme_of

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MX = "mxfp4-pack-quantized"
MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
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
        (compressed(format="marlin-24"), "format 'marlin-24' is not supported; supported: float-quantized"),
        (compressed(quantization_status="weird"), "quantization_status 'weird' is not supported; supported: initialized"),
        (compressed(config_groups=1), "config_groups must name groups"),
        (compressed(config_groups={"a": None}), "config_groups: a: it must be an object"),
        (compressed({**ARGUMENTS, "num_bits": 4}), "group_0: weights: num_bits 4 is not supported; supported: 8"),
        (compressed({**ARGUMENTS, "type": "int"}), "input_activations must be there for weights of 8-bit integers"),
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
        (compressed(PACKED, format="pack-quantized") | {"config_groups": 1}, "config_groups must name groups"),
        (compressed({**PACKED, "num_bits": 3}, format="pack-quantized"), "num_bits 3 is not supported; supported: 4, 8"),
        (compressed({**PACKED, "group_size": 96}, format="pack-quantized"), "group_size 96 is not supported; supported: 32"),
        (compressed({**PACKED, "type": "float"}, format="pack-quantized"), "weights: type 'float'"),
        (compressed({**PACKED, "strategy": "tensor"}, format="pack-quantized"), "weights: strategy 'tensor'"),
        (compressed({**PACKED, "actorder": "weird"}, format="pack-quantized"), "weights: actorder 'weird'"),
        (compressed(PACKED, ARGUMENTS, format="pack-quantized"), "input_activations go with no packed weights"),
        (compressed({**MXFP4, "group_size": 16}, format=MX), "weights: group_size 16 is not supported; supported: 32"),
        (compressed({**MXFP4, "num_bits": 8}, format=MX), "weights: num_bits 8 is not supported; supported: 4"),
        (compressed({**MXFP4, "type": "int"}, format=MX), "weights: type 'int' is not supported; supported: float"),
        (compressed(MXFP4, MXFP4, format=MX), "input_activations .* activations of 4 bits are not supported"),
        (compressed({**MXFP4, "group_size": 16}, format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
        ({**GPTQ, "bits": 3}, "bits 3 is not supported; supported: 4, 8"),
        ({**GPTQ, "group_size": 1024}, "group_size 1024 is not supported; supported: 32, 64, 128, -1"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2"),
        ({**GPTQ, "lm_head": "yes"}, "lm_head 'yes' is not supported"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ({**GPTQ, "dynamic": {"+:(": {}}}, "dynamic: .* is no regular expression"),
        ({**GPTQ, "dynamic": {"+:a": {"rank": 3}}}, "rank 3 is not supported"),
        ({**GPTQ, "desc_act": 1}, "desc_act 1 is not supported"),
        ({**AWQ, "version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ({**AWQ, "zero_point": False}, "zero_point False"),
        ({**FP8, "dequantize": True}, "dequantize True is not supported"),
        ({**GPTQ, "checkpoint_format": "gptq", "format": "gptq_v2"}, "checkpoint_format 'gptq' and format 'gptq_v2' contradict"),
        ({**GPTQ, "w_bit": 8}, "bits 4 and w_bit 8 contradict each other"),
        ({**GPTQ, "sym": "yes"}, "sym 'yes' is not supported"),
        ({**AWQ, "q_group_size": 64}, "group_size 128 and q_group_size 64 contradict each other"),
        ({**BNB, "_load_in_8bit": True}, "_load_in_8bit"),
        ({**BNB, "_load_in_4bit": False}, "load_in_4bit True and _load_in_4bit False contradict each other"),
        ({**AWQ, "bits": 8}, "bits 8 is not supported; supported: 4"),
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


def test_gptq_of_some_layers() -> None:
    spec = formats()["gptq"].read({**GPTQ, "dynamic": {r"-:.*q_proj": {}, r"+:.*down": {"bits": 8, "group_size": 32}}})
    found = [scheme_of(spec, f"model.layers.0.{name}") for name in ("self_attn.q_proj", "mlp.down_proj", "mlp.up_proj")]
    assert [scheme and (scheme.bits, scheme.weight_group) for scheme in found] == [None, (8, 32), (4, 128)]


def test_awq_excepts_layers_by_parts_of_their_names() -> None:
    spec = formats()["awq"].read({**AWQ, "modules_to_not_convert": ["visual", "o_pro"]})
    assert scheme_of(spec, "model.layers.0.self_attn.o_proj") is None
    assert scheme_of(spec, "lm_head") is None
    assert scheme_of(spec, "model.layers.0.self_attn.q_proj") is not None


VALUES: tuple[Any, ...] = (
    True,
    False,
    4,
    8,
    32,
    64,
    128,
    -1,
    [64, 64],
    [128, 128],
    "static",
    "dynamic",
    "gptq",
    "gptq_v2",
)
VALUES += ("nf4", "fp4", "e4m3", "gemm", "uint8", "int32", "x", ["x"], {"-:x": {}}, {"x": 1}, {"format": "dense"})
SAYS_NOTHING = words("""
    quant_method damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name quantizer meta
    tokenizer dataset batch_size use_cuda_fp16 use_exllama disable_exllama exllama_config max_input_length pad_token_id
    cache_block_outputs block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize model_seqlen mse
    act_group_aware backend do_fuse fuse_max_seq_len modules_to_fuse quant_type version kv_cache_scheme quantization_status
    global_compression_ratio dequantize llm_int8_threshold bnb_4bit_compute_dtype bnb_4bit_use_double_quant
""")
"""How a checkpoint was made, with what it was run, and what its tensors tell themselves (layers that are quantised, nested scales).
dequantize: how transformers computes with MXFP4; of FP8 it is refused."""
WHOLE: dict[str, dict[str, Any]] = {
    "fp8": FP8,
    "gptq": GPTQ,
    "awq": AWQ,
    "bitsandbytes": BNB,
    "compressed-tensors": compressed(),
    "mxfp4": {"quant_method": "mxfp4"},
}


@pytest.mark.parametrize("method", WHOLE)
def test_no_key_is_read_and_dropped(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key that is taken changes what is read, or is refused with any value but one that asks for nothing."""
    known: set[str] = set()
    for module in (quantization, packed_quantization):
        monkeypatch.setattr(module, "only", lambda config, names: known.update(names.split()))
    read, plain = formats()[method].read, WHOLE[method]
    usual = read(plain)
    monkeypatch.undo()
    for key in sorted(known - SAYS_NOTHING - plain.keys()):
        assert _changes(read, {**plain, key: None}, key, usual), key
    for key in sorted(plain.keys() - SAYS_NOTHING):
        assert _changes(read, plain, key, usual), key


def _changes(read: Any, config: dict[str, Any], key: str, usual: Any) -> bool:
    """Whether some value changes what is read, or at most one beside null and false is taken at all."""
    taken = []
    for value in VALUES:
        with contextlib.suppress(ValueError):
            found = read({**config, key: value})
            if found != usual:
                return True
            taken.append(value)
    switch = any(value is True for value in taken) and any(value is False for value in taken)
    return not switch and len([value for value in taken if value is not False]) <= 1
