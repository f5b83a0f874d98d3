"""A setting that has no effect beside the others is named, and no other."""

import pytest

from meshlm.supervisor.settings import flags, notes

CPU, GPU, FAKE = (notes.Facts(device, transcribes=False) for device in ("cpu", "cuda", "fake"))
VALUES: dict[str, object] = {  # other than the default, one that goes with nothing else
    "fake_step_ms": 5.0,
    "fake_drafts": 2,
    "cpu_threads": 2,
    "tune": "off",
    "tuning_dir": "/x",
    "disable_cascade_attn": True,
    "gpu_memory_utilization": 0.5,
    "compile_dynamic_shapes": "unbacked",
    "all2all_backend": "all_to_all",
    "dbo_decode_token_threshold": 8,
    "dbo_prefill_token_threshold": 8,
    "master_addr": "10.0.0.1",
    "master_port": 3000,
    "mesh_port_range": "5000-5100",
    "advertise_host": "10.0.0.1",
    "key_file": "/x",
    "peer_timeout": 9.0,
    "responses_store_count": 9,
    "responses_store_bytes": 1 << 20,
    "record_requests_bytes": 1 << 20,
    "max_audio_bytes": 1 << 20,
    "max_audio_seconds": 9,
    "per_request_spec_decode_metrics": "summary",
    "tool_parser_plugin": "/x",
    "reasoning_parser_plugin": "/x",
    "kv_cache_metrics_sample": 0.5,
    "max_loras": 2,
    "max_lora_rank": 32,
    "max_cpu_loras": 2,
    "lora_dtype": "bfloat16",
    "lora_target_modules": ("q_proj",),
    "fully_sharded_loras": True,
    "lora_resolver_dir": "/x",
    "allow_runtime_lora_updating": True,
}
WITH: dict[str, dict[str, object]] = {  # what gives them one
    "compile_dynamic_shapes": {"compile": "inductor"},
    "all2all_backend": {"enable_expert_parallel": True, "data_parallel_size": 2},
    **{f"dbo_{kind}_token_threshold": {"enable_dbo": True} for kind in ("decode", "prefill")},
    **{name: {"nnodes": 2, "tensor_parallel_size": 2} for name in ("master_addr", "master_port")},
    **{
        name: {"listen": "tcp://10.0.0.1:5000"}
        for name in ("mesh_port_range", "advertise_host", "key_file", "peer_timeout")
    },
    "per_request_spec_decode_metrics": {"fake_drafts": 3},
    "record_requests_bytes": {"record_requests": "/x"},
    "tool_parser_plugin": {"tool_call_parser": "hermes"},
    "reasoning_parser_plugin": {"reasoning_parser": "qwen3"},
    "kv_cache_metrics_sample": {"kv_cache_metrics": True},
    **{
        name: {"enable_lora": True}
        for name in (
            *(
                "max_loras",
                "max_lora_rank",
                "max_cpu_loras",
                "lora_dtype",
                "lora_target_modules",
                "lora_resolver_dir",
                "fully_sharded_loras",
            ),
            "allow_runtime_lora_updating",
        )
    },
}


def test_every_rule_has_its_case() -> None:
    assert {name for rule in notes.RULES for name in rule.names} == set(VALUES)


@pytest.mark.parametrize("name", VALUES)
def test_a_setting_is_named_where_it_has_no_effect(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    store = {"responses_store": "off"} if name.startswith("responses") else {}
    device = GPU if name.startswith(("fake", "cpu")) else CPU
    (said,) = notes.of_idle(flags.build({name: VALUES[name], **store}, None), device)
    assert said.startswith(f"without effect here: {flag} (it is of ")
    assert said.count("(it is of") == 1
    of_fake = name.startswith(("fake", "per_request"))
    right = FAKE if of_fake else CPU if name == "cpu_threads" else GPU._replace(transcribes=True)
    assert notes.of_idle(flags.build({name: VALUES[name], **WITH.get(name, {})}, None), right) == []
    assert notes.of_idle(
        flags.build({name: VALUES[name], **WITH.get(name, {}), **store}, None), notes.Facts("plug-in", True)
    ) == ([said] if store else [])


def test_nothing_is_said_of_defaults_and_a_size_of_the_cache_wins() -> None:
    for facts in (CPU, GPU, FAKE):
        assert notes.of_idle(flags.build({}, None), facts) == []
    both: dict[str, object] = {"kv_cache_memory": 1 << 30, "gpu_memory_utilization": 0.5}
    assert notes.of_idle(flags.build(both, None), GPU) == [
        "without effect here: --gpu-memory-utilization (it is of KV caches whose size --kv-cache-memory does not say)"
    ]
