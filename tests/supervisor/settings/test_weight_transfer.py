"""--weight-transfer-config: vLLM's JSON, or one line that names what cannot be honoured."""

import json
from typing import Any

import pytest
from msgspec.structs import replace
from tiny_models import spec_of

from meshlm.protocol.config import MeshConfig, ModelConfig, NetworkConfig, ParallelConfig, WorkerConfig
from meshlm.runtime import platforms
from meshlm.supervisor.api.arguments import settings_of
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flag_rules, rules, weight_transfer


def settled(given: Any) -> MeshConfig:
    text = given if isinstance(given, str) else json.dumps(given)
    return weight_transfer.settled(MeshConfig(worker=WorkerConfig(weight_transfer_config=text)))


def test_backends() -> None:
    assert weight_transfer.settled(MeshConfig()) == MeshConfig()
    for backend, receives in (("nccl", True), ("gloo", True), ("ipc", True), ("disk", False)):
        found = settled({"backend": backend}).worker
        assert (found.weight_transfer, found.receives_weights) == (backend, receives)
    assert settled({}).worker.weight_transfer == "nccl", "vLLM's default"
    assert settled({"backend": "sparse_nccl"}).worker.weight_transfer == "nccl", "it takes changes, too"
    assert settings_of({"weight_transfer_config": {"backend": "ipc"}}) == {
        "weight_transfer_config": '{"backend": "ipc"}'
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "--weight-transfer-config {: "),
        ([], "--weight-transfer-config []: a JSON object is expected"),
        ({"backend": "m2n"}, '--weight-transfer-config: backend "m2n": unknown; there are disk, gloo, ipc, nccl'),
        ({"backend": 3}, "--weight-transfer-config: backend 3: unknown"),
        ({"backnd": "nccl"}, "--weight-transfer-config: backnd: unknown; backend is one"),
    ],
)
def test_what_is_unknown_is_refused(given: Any, said: str) -> None:
    with pytest.raises(UsageError) as found:
        settled(given)
    assert str(found.value).startswith(said)


@pytest.mark.parametrize(
    ("backend", "device", "more", "said"),
    [
        ("nccl", "cpu", {}, "NCCL needs GPUs; on --device cpu gloo does the same"),
        ("gloo", "cpu", {"parallel": ParallelConfig(nnodes=2)}, "this mesh has several"),
        ("ipc", "cuda", {"network": NetworkConfig(listen="0.0.0.0")}, "this mesh has several"),
        ("ipc", "cpu", {"model": ModelConfig(model="m", load_format="gguf")}, "has other names or shapes"),
        ("ipc", "cpu", {}, ""),
        ("nccl", "cuda", {}, ""),
        ("disk", "cpu", {"parallel": ParallelConfig(nnodes=2)}, ""),
    ],
)
def test_what_cannot_have_it(backend: str, device: str, more: dict[str, Any], said: str) -> None:
    config = replace(settled({"backend": backend}), **more)
    facts = flag_rules.Facts(spec_of(), platforms.named(device))
    if not said:
        rules.check(weight_transfer.rules(config, facts, pools=False))
        return
    with pytest.raises(UsageError, match=said):
        rules.check(weight_transfer.rules(config, facts, pools=False))
