"""Rollouts of verl by a mesh: a RolloutReplica whose server is a mesh, and what a trainer's workers send weights to it with.

    import examples.verl_rollout                        # in the program that verl starts, before its trainer
    actor_rollout_ref.rollout.name=meshlm               # then, in verl's configuration
    actor_rollout_ref.rollout.engine_kwargs.meshlm.max_num_seqs=256      # flags of `meshlm serve`

A replica is one mesh on one node, in a Ray actor of its own. Weights go through the host's memory (weight_sender.py), so the first
worker of a replica is on that node, as verl places it. A mesh that loses a process mends itself: requests wait for it, and come to
their end.
Written for verl 0.9, whose interfaces are verl/workers/rollout/replica.py and base.py.
"""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import ray
from torch import Tensor
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput
from weight_sender import BUFFER_BYTES, MemorySender

NAME = "meshlm"
START_S = 1800.0
Weights = Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]]


def actor_name(replica_rank: int) -> str:
    return f"{NAME}_server_{replica_rank}"


class MeshServer:
    """The mesh of one replica, and what verl asks of it. A Ray actor."""

    def __init__(self, config: Any, model_config: Any, rollout_mode: RolloutMode, devices: str) -> None:
        """devices: of CUDA_VISIBLE_DEVICES; empty: those that there are."""
        self._config, self._model, self._mode, self._devices = config, model_config, rollout_mode, devices
        self._process: asyncio.subprocess.Process | None = None
        self._steps: int | None = None
        self.address = ""

    def command(self, port: int) -> list[str]:
        """That of the mesh; flags of engine_kwargs come last."""
        config = self._config
        words = [
            sys.executable,
            "-P",
            "-m",
            "meshlm.supervisor",
            "serve",
            str(self._model.local_path),
            "--port",
            str(port),
        ]
        words += ["--server-dev-mode", "--weight-transfer-config", json.dumps({"backend": "ipc"})]
        words += ["--tensor-parallel-size", str(config.tensor_model_parallel_size)]
        words += ["--data-parallel-size", str(config.data_parallel_size)]
        words += ["--pipeline-parallel-size", str(config.pipeline_model_parallel_size)]
        words += [
            "--dtype",
            config.dtype,
            "--max-num-seqs",
            str(config.max_num_seqs),
            "--logprobs-mode",
            "processed_logprobs",
        ]
        words += ["--max-model-len", str(config.max_model_len)] if config.max_model_len else []
        words += ["--enable-sleep-mode"] if config.free_cache_engine else []
        for name, value in (config.engine_kwargs.get(NAME) or {}).items():
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
        return words

    async def launch(self) -> str:
        """Starts the mesh, and gives its address once it serves. RuntimeError where it ends before."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        visible = {"CUDA_VISIBLE_DEVICES": self._devices} if self._devices else {}
        command = [*self.command(port), "--host", host]
        self._process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **visible})
        self.address, until = f"{host}:{port}", time.monotonic() + START_S
        while True:
            if self._process.returncode is not None or time.monotonic() > until:
                raise RuntimeError(f"the mesh of {self.address} did not start; its log says why")
            try:
                if (await self._get("/ready")).status_code == 200:
                    return self.address
            except httpx.TransportError:
                pass  # it does not listen yet
            await asyncio.sleep(0.2)

    async def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            await self._process.wait()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        **more: Any,
    ) -> TokenOutput:
        """Tokens for a prompt of tokens. ValueError: what is asked for cannot be had."""
        if image_data or video_data or more.get("audio_data"):
            raise ValueError("this example sends prompts of tokens alone")
        asked, config = dict(sampling_params), self._config
        room = config.response_length + config.prompt_length - len(prompt_ids)
        asked["max_tokens"] = (
            asked.pop("max_tokens", None) or asked.pop("max_new_tokens", None) or min(config.response_length, room)
        )
        with_logprobs = bool(asked.pop("logprobs", False))
        body = {**asked, "prompt": list(prompt_ids), "return_token_ids": True, "logprobs": 0 if with_logprobs else None}
        answer = await self._post("/v1/completions", body, {"X-Request-Id": request_id, "Idempotency-Key": request_id})
        choice = answer["choices"][0]
        is_aborted = choice["finish_reason"] == "abort"
        return TokenOutput(
            token_ids=choice["token_ids"],
            log_probs=choice["logprobs"]["token_logprobs"] if with_logprobs else None,
            stop_reason="aborted" if is_aborted else "completed",
            extra_fields={"global_steps": self._steps, "weights_version": answer["usage"].get("weights_version")},
        )

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if self._mode != RolloutMode.STANDALONE and self._config.free_cache_engine:
            await self._post(
                "/wake_up" + "".join(f"{'&' if nth else '?'}tags={tag}" for nth, tag in enumerate(tags or ()))
            )

    async def sleep(self, **_: Any) -> None:
        """Level 2 where the trainer is about to send the weights anew."""
        if self._mode != RolloutMode.STANDALONE and self._config.free_cache_engine:
            await self._post(f"/sleep?level={2 if self._mode == RolloutMode.HYBRID else 1}&mode=wait")

    async def abort_all_requests(self, reset_prefix_cache: bool = True, **_: Any) -> dict[str, Any]:
        """What runs ends; what comes then waits for `resume_generation`."""
        await self._post(f"/pause?mode=abort&clear_cache={str(reset_prefix_cache).lower()}")
        return {"aborted_count": 0, "request_ids": []}

    async def resume_generation(self) -> None:
        await self._post("/resume")

    async def abort_request(self, request_id: str, **_: Any) -> dict[str, Any]:
        await self._post("/abort_requests", {"request_ids": [request_id]})
        return {"aborted": True, "request_id": request_id}

    async def clear_kv_cache(self) -> None:
        await self._post("/reset_prefix_cache?reset_running_requests=true")

    async def release_kv_cache(self) -> None:
        """The mesh keeps its KV cache: weights are received beside it, in the host's memory."""

    async def resume_kv_cache(self) -> None:
        """See `release_kv_cache`."""

    async def set_global_steps(self, global_steps: int) -> None:
        self._steps = global_steps

    async def get_address(self) -> str:
        return self.address

    async def start_profile(self, **_: Any) -> None:
        await self._post("/start_profile")

    async def stop_profile(self) -> None:
        await self._post("/stop_profile")

    async def _get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=f"http://{self.address}", timeout=60) as client:
            return await client.get(path)

    async def _post(self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> Any:
        """ValueError in the mesh's words."""
        async with httpx.AsyncClient(base_url=f"http://{self.address}", timeout=None) as client:
            answer = await client.post(path, json=body or {}, headers=headers)
        if answer.status_code != 200:
            raise ValueError(f"{path}: {answer.text}")
        return answer.json() if answer.content else {}


class MeshReplica(RolloutReplica):
    """One mesh. verl makes its workers, which have the devices, and asks `launch_servers` then."""

    async def launch_servers(self) -> None:
        if self.nnodes != 1:
            raise ValueError(
                f"a replica of {self.world_size} devices is on {self.nnodes} nodes; this example starts a mesh of one"
            )
        node, devices = await self._node_of_workers()
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        server = (
            ray.remote(MeshServer)
            .options(
                name=actor_name(self.replica_rank), scheduling_strategy=affinity, max_concurrency=self.max_concurrency
            )
            .remote(self.config, self.model_config, self.rollout_mode, devices)
        )
        self.servers.append(server)
        self._server_address, self._server_handle = await server.launch.remote(), server

    async def _node_of_workers(self) -> tuple[str, str]:
        """Where they are, and their devices."""
        told = await asyncio.gather(*[worker.__ray_call__.remote(_place_of) for worker in self.workers])
        return told[0][0], ",".join(device for _, device in told if device)

    async def abort_all_requests(self, **asked: Any) -> dict[str, Any]:
        found: dict[str, Any] = await self._server_handle.abort_all_requests.remote(**asked)
        return found


def _place_of(worker: Any) -> tuple[str, str]:
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get("GPU") or [""]
    return context.get_node_id(), str(devices[0])


class ServerAdapter(BaseRollout):
    """In each of a trainer's workers: what it does with the mesh of its replica. The first worker of the replica does it for all."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        each = config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // each if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % each == 0

    @property
    def _server(self) -> Any:
        return ray.get_actor(actor_name(self.replica_rank))

    async def resume(self, tags: list[str]) -> None:
        if self.is_leader_rank:
            await self._server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        if self.is_leader_rank:
            await self._server.sleep.remote()

    async def update_weights(
        self, weights: Weights, wire_format: str = "named_tensors", global_steps: int | None = None, **more: Any
    ) -> None:
        """All workers read the weights, of which each has a part. weight_sender.Refused: the mesh keeps those from before."""
        if wire_format != "named_tensors":
            raise NotImplementedError(
                f"checkpoint_engine: {wire_format} is not taken; use an engine that sends whole tensors"
            )
        if not self.is_leader_rank:
            async for _ in _each(weights):
                pass
            return
        sender = MemorySender(f"http://{await self._server.get_address.remote()}")
        try:
            name = "" if global_steps is None else f"step-{global_steps}"
            with sender.mesh.update(name):
                await self._send(sender, weights)
            await self._server.set_global_steps.remote(global_steps)
        finally:
            sender.close()

    async def _send(self, sender: MemorySender, weights: Weights) -> None:
        part: list[tuple[str, Tensor]] = []
        async for name, tensor in _each(weights):
            part.append((name, tensor.detach().to("cpu", copy=True)))  # the engine writes the next one there
            if sum(one.nbytes for _, one in part) > BUFFER_BYTES:
                await asyncio.to_thread(sender.send_part, part)
                part = []
        if part:
            await asyncio.to_thread(sender.send_part, part)


async def _each(weights: Weights) -> AsyncIterator[tuple[str, Tensor]]:
    if isinstance(weights, AsyncIterator):
        async for one in weights:
            yield one
    else:
        for one in weights:
            yield one


RolloutReplicaRegistry.register(NAME, lambda: MeshReplica)
_ROLLOUT_REGISTRY[NAME, "async"] = f"{Path(__file__).stem}.ServerAdapter"
