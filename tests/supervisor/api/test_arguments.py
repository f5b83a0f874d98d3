"""The keyword arguments of `LLM`: vLLM's names and values, without a mesh."""

import json
from pathlib import Path

import pytest

from meshlm.supervisor.api.arguments import settings_of
from meshlm.supervisor.settings import flags

NAMES = json.loads((Path(__file__).parents[1] / "vllm_0_26_flags.json").read_text("utf-8"))["LLM"]


def test_vllms_names_and_values() -> None:
    given = settings_of(
        {
            "tensor_parallel_size": 2,
            "kv_cache_memory_bytes": "1G",
            "max_model_len": "32k",
            "attention_backend": "FLASH_ATTN",
            "served_model_name": "mine",
            "override_generation_config": {"top_k": 1},
            "cudagraph_capture_sizes": (1, 2),
            "trust_remote_code": True,
            "tokenizer_mode": "auto",
            "quantization": None,
            "enable_lora": False,
            "tokenizer": None,
        }
    )
    config = flags.build(given, None)
    assert (config.parallel.tensor_parallel_size, config.cache.kv_cache_memory) == (2, 1 << 30)
    assert (config.model.max_model_len, config.worker.attention_backend) == (32000, "auto")
    assert (config.model.served_model_name, config.worker.cudagraph_capture_sizes) == (("mine",), (1, 2))
    assert config.model.override_generation_config == '{"top_k": 1}'


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("quantization_config", "x", "--quantization is the setting: fp8 and bitsandbytes"),
        ("default_mm_loras", {"image": "x"}, "a request names its adapter"),
        ("max_model_len", "long", "max_model_len"),
        ("kv_cache_memory", "1X", "no size"),
    ],
)
def test_what_is_not_there_is_refused_by_name(name: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings_of({name: value})


def test_nobody_knows_it() -> None:
    with pytest.raises(TypeError, match="unknown argument 'max_modle_len'"):
        settings_of({"max_modle_len": None})


def test_every_argument_of_vllm_is_known() -> None:
    assert settings_of(dict.fromkeys(NAMES)) == {}


def test_switches_and_values_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings_of({"async_scheduling": False}) == {"async_depth": 1}
    assert settings_of({"enable_log_requests": False}) == {"disable_log_requests": True}
    assert settings_of({"use_fp64_gumbel": False}) == {}
    assert capsys.readouterr().err == ""
    assert settings_of({"optimization_level": 2}) == {}
    assert "nothing is compiled" in capsys.readouterr().err
    assert settings_of({"use_fp64_gumbel": True, "attention_backend": "FLASHINFER"}) == {"attention_backend": "auto"}
    said = capsys.readouterr().err
    assert "--use-fp64-gumbel is not needed" in said
    assert "--attention-backend FLASHINFER is taken as auto" in said


# Defaults of LLM() in vLLM, and what lm-evaluation-harness and the like give it, which ask for nothing that is not there.
HARMLESS: list[dict[str, object]] = [
    {"disable_log_stats": False},
    {"disable_log_stats": True},
    {"enable_lora": False, "max_lora_rank": 16, "max_loras": 1, "fully_sharded_loras": False, "lora_dtype": "auto"},
    {"swap_space": 4, "max_seq_len_to_capture": 8192, "cpu_offload_gb": 0, "skip_tokenizer_init": False},
    {"ignore_patterns": "original/**/*"},
    {"ignore_patterns": ["original/**/*"]},
    {"kv_offloading_backend": "native", "dcp_comm_backend": "ag_rs", "mm_encoder_tp_mode": "weights"},
    {"dcp_kv_cache_interleave_size": 1, "cp_kv_cache_interleave_size": 1, "offload_backend": "auto"},
    {"offload_group_size": 0, "offload_num_in_group": 1, "offload_prefetch_step": 1, "logits_processors": []},
]


@pytest.mark.parametrize("given", HARMLESS)
def test_what_asks_for_nothing_is_taken(given: dict[str, object]) -> None:
    assert flags.build(settings_of(given), None) == flags.build({}, None)


def test_values_as_python_has_them() -> None:
    """vLLM takes a mode alone, and a dtype of torch."""

    class Dtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    Dtype.__module__ = "torch"
    config = flags.build(settings_of({"compilation_config": 3, "dtype": Dtype()}), None)
    assert (config.worker.compilation_config, config.model.dtype) == ("3", "bfloat16")
    for name, value, said in (
        ("hf_overrides", lambda config: config, "a dict of keys of config.json is expected"),
        ("logits_processors", True, "a list of classes, or of their names"),
    ):
        with pytest.raises(ValueError, match=f"LLM: {name}: {said}"):
            settings_of({name: value})


@pytest.mark.parametrize(("name", "value"), [("distributed_executor_backend", "ray"), ("optimization_level", 0)])
def test_what_is_not_so_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        settings_of({name: value})
