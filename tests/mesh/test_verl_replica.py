"""examples/verl_rollout.py: a replica of verl's is a mesh, through a step of training. verl and Ray are doubles of their signatures."""

import asyncio
import importlib
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import verl_double
from changing_weights import write
from split_models import COUNT, PROMPTS

pytestmark = pytest.mark.mesh
FLAGS = {
    "device": "cpu",
    "cpu_threads": 1,
    "kv_cache_memory": "8M",
    "max_num_batched_tokens": 64,
    "standby_roles": "none",
}
SAMPLING = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True, "logprobs": True}


def config() -> Any:
    return types.SimpleNamespace(
        tensor_model_parallel_size=1, data_parallel_size=1, pipeline_model_parallel_size=1, dtype="float32", max_num_seqs=16,
        max_model_len=512, prompt_length=256, response_length=128, free_cache_engine=True, engine_kwargs={"meshlm": FLAGS},
    )  # fmt: skip


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(f"{folder}/model.safetensors")
    return found


async def step_of_training(replica: Any, adapter: Any, other: Path, expected: list[list[list[int]]]) -> None:
    server = replica._server_handle

    async def generated() -> list[list[int]]:
        asked = [
            server.generate.remote(prompt, dict(SAMPLING), f"r-{nth}-{id(adapter)}")
            for nth, prompt in enumerate(PROMPTS)
        ]
        outputs = await asyncio.gather(*asked)
        assert all(len(one.log_probs) == COUNT and one.stop_reason == "completed" for one in outputs)
        return [one.token_ids for one in outputs]

    assert await generated() == expected[0]
    await adapter.release()
    await adapter.resume(["weights"])
    await adapter.update_weights(iter(weights_of(str(other)).items()), global_steps=7)
    await adapter.resume(["kv_cache"])
    output = await server.generate.remote(PROMPTS[1], dict(SAMPLING), "again")
    assert (output.token_ids, output.extra_fields) == (expected[1][1], {"global_steps": 7, "weights_version": "step-7"})
    await replica.abort_all_requests(reject_request=True)
    waits = server.generate.remote(PROMPTS[0], dict(SAMPLING), "waits")
    await replica.clear_kv_cache()
    assert not waits.done()
    await replica.resume_generation()
    assert (await waits).token_ids == expected[1][0]
    with pytest.raises(ValueError, match="tokens alone"):
        await server.generate.remote(PROMPTS[0], {}, "image", image_data=[b""])
    with pytest.raises(NotImplementedError, match="delta_flush is not taken"):
        await adapter.update_weights(iter(()), wire_format="delta_flush")
    with pytest.raises(importlib.import_module("weight_sender").Refused, match="missing"):
        await adapter.update_weights(iter(list(weights_of(str(other)).items())[1:]), global_steps=8)
    assert (await server.generate.remote(PROMPTS[0], dict(SAMPLING), "old")).token_ids == expected[1][0]


def test_a_replica_through_a_step_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    example = verl_double.example()
    first, other = tmp_path / "first", tmp_path / "other"
    expected = [write(first, 0), write(other, 1)]
    model = types.SimpleNamespace(local_path=str(first))
    kind = verl_double.RolloutReplicaRegistry.known["meshlm"]()
    assert verl_double.ROLLOUTS["meshlm", "async"] == "verl_rollout.ServerAdapter"

    async def run() -> None:
        replica = kind(0, config(), model)
        try:
            await replica.init_hybrid(types.SimpleNamespace(workers=[verl_double.Handle(object())]))
            adapter = example.ServerAdapter(config(), model, None)
            assert adapter.is_leader_rank
            await step_of_training(replica, adapter, other, expected)
        finally:
            for server in replica.servers:
                await server.stop.remote()

    asyncio.run(run())
