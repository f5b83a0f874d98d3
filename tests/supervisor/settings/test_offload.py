"""--cpu-offload-gb and --cpu-offload-params: what cannot have them is refused by name, before any process starts."""

from pathlib import Path
from typing import Any

import pytest
from split_models import small_model

from meshlm.runtime import platforms
from meshlm.runtime.process import host_memory
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flag_rules, flags, resolve

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cpu_offload_gb": 1.0}, "--cpu-offload-gb 1: it is for GPUs; with --device cpu"),
    ({"cpu_offload_gb": 1.0, "device": "fake"}, "--cpu-offload-gb 1: it is for GPUs; with --device fake"),
    ({"cpu_offload_params": ("mlp",)}, "--cpu-offload-params: it says which weights --cpu-offload-gb leaves"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_has_no_gpu(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    values: dict[str, object] = {
        "model": small_model(tmp_path, "llama"),
        "load_format": "dummy",
        "device": "cpu",
        **given,
    }
    with pytest.raises(UsageError) as raised:
        resolve.resolve(flags.build(values, None))
    assert said in str(raised.value)


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"enable_sleep_mode": True}, "with --enable-sleep-mode weights stay on the GPU"),
    ({"compile": "inductor"}, "with --compile weights stay on the GPU"),
    ({"deterministic": True}, "with --deterministic weights stay on the GPU"),
    ({"tensor_parallel_size": 2}, "this machine has 3.0 GiB left for the weights of 2 workers"),
    ({}, ""),
]


@pytest.mark.parametrize(("given", "said"), OTHERS)
def test_what_a_gpu_cannot_have_beside(
    given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available", lambda: 3 << 30)
    values: dict[str, object] = {"model": small_model(tmp_path, "llama"), "load_format": "dummy", "device": "cpu"}
    resolved = resolve.resolve(flags.build(values, None))
    config = flags.build({**values, "cpu_offload_gb": 2.0, **given}, None)
    facts = flag_rules.Facts(resolved.require_resolved().spec, platforms.named("cuda"))
    texts = [f"{flag}: {text}" for refused, flag, text in flag_rules._offload(config, facts) if refused]
    assert [said in text for text in texts] == ([True] if said else [])
