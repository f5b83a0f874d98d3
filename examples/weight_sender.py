"""Sends the weights of a torch model to a mesh that serves, without a file: over gloo or through memory of the same host.

    meshlm serve MODEL --server-dev-mode --weight-transfer-config '{"backend": "ipc"}'

    sender = MemorySender("http://localhost:8000")     # or GlooSender(url, port), with {"backend": "gloo"}
    sender.send(model.named_parameters(), "step-1")

It needs torch and httpx, and nothing of MeshLM. On GPUs, trainers that know vLLM (TRL, SkyRL, prime-rl) do the same over NCCL, with
{"backend": "nccl"}.
"""

import contextlib
import os
import socket
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

BUFFER_BYTES = 64 << 20
LIMIT_S = 1800.0
Named = Iterable[tuple[str, Tensor]]


class Refused(Exception):
    """The mesh does not take these weights, and why. It serves the ones from before."""


class Mesh:
    """The routes that a trainer calls."""

    def __init__(self, url: str, **client: Any) -> None:
        """client: of httpx.Client, as headers with an API key."""
        self._http = httpx.Client(base_url=url, timeout=LIMIT_S, **client)

    def close(self) -> None:
        self._http.close()

    def world_size(self) -> int:
        """The number of workers."""
        return int(self._http.get("/get_world_size").raise_for_status().json()["world_size"])

    def post(self, path: str, body: dict[str, Any]) -> None:
        """Refused in the mesh's words."""
        answer = self._http.post(path, json=body)
        if answer.status_code != 200:
            raise Refused(f"{path}: {answer.json()['error']['message']}")

    @contextlib.contextmanager
    def update(self, name: str, **finish: Any) -> Iterator[None]:
        """An update of the weights: what is sent inside is taken at its end, or not at all."""
        self.post("/start_weight_update", {})
        try:
            yield
        except BaseException:
            with contextlib.suppress(Refused, httpx.HTTPError):  # what went wrong is being raised
                self.post("/finish_weight_update", {"abort": True})
            raise
        self.post("/finish_weight_update", {"weight_version": name, **finish})


def told(tensors: list[tuple[str, Tensor]]) -> dict[str, Any]:
    """What the mesh is about to get."""
    return {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }


def as_bytes(tensors: list[tuple[str, Tensor]]) -> Tensor:
    """All of them, one after the other: [num_bytes] uint8."""
    flat = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for _, tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def buckets(tensors: Named, most: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in parts; each ends as soon as it has more than `most` bytes."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        part.append((name, tensor))
        size += tensor.nbytes
        if size > most:
            yield part
            part, size = [], 0
    if part:
        yield part


class MemorySender:
    """Through files below /dev/shm, one at a time, which the workers of the same host read."""

    def __init__(self, url: str, **client: Any) -> None:
        self.mesh = Mesh(url, **client)
        self.mesh.post("/init_weight_transfer_engine", {"init_info": {}})

    def close(self) -> None:
        self.mesh.close()

    def send(self, tensors: Named, name: str, **finish: Any) -> None:
        """Has the mesh serve these weights under this name. finish: of POST /finish_weight_update, as mode. Refused."""
        with self.mesh.update(name, **finish):
            for part in buckets(tensors, BUFFER_BYTES):
                self.send_part(part)

    def send_part(self, part: list[tuple[str, Tensor]]) -> None:
        """Some of the tensors of an update. Refused."""
        file = Path("/dev/shm") / f"weights-{os.getpid()}-{uuid.uuid4().hex}"
        try:
            file.touch(mode=0o600)
            file.write_bytes(as_bytes(part).numpy().tobytes())
            bucket = {"name": file.name, "count": len(part)}
            self.mesh.post("/update_weights", {"update_info": {**told(part), "buckets": [bucket]}})
        finally:
            file.unlink(missing_ok=True)


class GlooSender:
    """Over TCP: this process is rank 0 of a group with all workers, and broadcasts."""

    def __init__(self, url: str, port: int, address: str = "127.0.0.1", **client: Any) -> None:
        """port: of this host, `address`, for the ranks to meet. Refused."""
        self.mesh = Mesh(url, **client)
        self._address, self._port = address, port
        self._threads = ThreadPoolExecutor(1)
        try:
            self.join()
        except BaseException:
            self._threads.shutdown(wait=False)
            self.mesh.close()
            raise

    def close(self) -> None:
        """The workers see that this process has left the group; they serve on."""
        self._group.abort()
        self._threads.shutdown()
        self.mesh.close()

    def join(self) -> None:
        """All workers join; again after one of them was lost. Refused."""
        size = self.mesh.world_size() + 1
        info = {"master_address": self._address, "master_port": self._port, "rank_offset": 1, "world_size": size}
        listening = socket.create_server((self._address, self._port))
        asked = self._threads.submit(
            self.mesh.post, "/init_weight_transfer_engine", {"init_info": {**info, "packed": True}}
        )
        try:
            self._meet(size, listening)
        except RuntimeError:
            if asked.done():
                asked.result()  # the mesh says why
            raise
        asked.result()

    def _meet(self, size: int, listening: socket.socket) -> None:
        self._store = TCPStore(
            self._address,
            self._port,
            size,
            True,
            timedelta(seconds=60),
            use_libuv=False,
            master_listen_fd=listening.detach(),
        )
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = timedelta(seconds=60)
        self._group: Any = ProcessGroupGloo(PrefixStore("gloo", self._store), 0, size, options)

    def send(self, tensors: Named, name: str, **finish: Any) -> None:
        """As MemorySender.send."""
        with self.mesh.update(name, **finish):
            for part in buckets(tensors, 16 * BUFFER_BYTES):
                body = {"update_info": {**told(part), "packed": True, "packed_buffer_size_bytes": BUFFER_BYTES}}
                asked = self._threads.submit(self.mesh.post, "/update_weights", body)
                for piece in buckets(part, BUFFER_BYTES):
                    self._broadcast(as_bytes(piece), asked)
                asked.result()

    def send_changes(self, changes: Iterable[tuple[str, Tensor, Tensor, Tensor]], name: str, **finish: Any) -> None:
        """Of each tensor its name, the tensor, the places (int32 [m], of the flat tensor) where it differs from what the mesh has, and
        the numbers there. Refused."""
        with self.mesh.update(name, **finish):
            for named, tensor, places, values in changes:
                info = {**told([(named, tensor)]), "num_updates_list": [len(places)]}
                asked = self._threads.submit(self.mesh.post, "/update_weights", {"update_info": info})
                for data in (places, values) if len(places) else ():
                    self._broadcast(data, asked)
                asked.result()

    def _broadcast(self, data: Tensor, asked: "Future[None]") -> None:
        """Ends as soon as the mesh has refused the weights, or a worker is gone."""
        try:
            work = self._group.broadcast(data, 0)
            while not work.is_completed():
                if asked.done() and asked.exception() is not None:
                    self._group.abort()
                    break
            work.wait()
        except RuntimeError:
            asked.result()  # the mesh says why
            raise
