"""Weights that a trainer sends as tensors: over gloo and through memory, as examples/weight_sender.py does."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from changing_weights import not_ready, post, versions, write
from senders import Refused, dev, example, sender, tensors
from serving import Serving, serving
from split_models import greedy
from waiting import free_port, until

from meshlm.runtime.model_files import received

pytestmark = pytest.mark.mesh
Models = tuple[list[str], list[list[list[int]]]]
NOTICED_S = 10.0  # a death in a broadcast ends the trainer's call within


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Three folders, and the greedy tokens of each."""
    folder = tmp_path_factory.mktemp("models")
    names = [str(folder / name) for name in "abc"]
    return names, [write(Path(name), seed) for seed, name in enumerate(names)]


def kill(server: Serving, role: str) -> None:
    """And wait until there is another one."""
    os.kill(pid := server.pid(role), signal.SIGKILL)
    until(lambda: pid not in [one["pid"] for one in server.status()["processes"]], 60)


def settled(server: Serving) -> str:
    """The mesh's version, once every rank has it."""
    until(lambda: all(one["state"] == "ready" for one in server.status()["processes"]), 180)
    until(lambda: not_ready(server) == "" and {*versions(server)[1]} == {(versions(server)[0], "")}, 60)
    return versions(server)[0]


def kept(server: Serving) -> int:
    """How many updates the host's memory holds."""
    folder = received.folder_of(Path(server.run_dir))
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_memory_of_the_host(models: Models) -> None:
    """What is wrong changes nothing; what was sent outlives the worker, the next update, and a sleep, and is gone with the mesh."""
    (a, b, c), (first, second, third) = models
    with serving(a, *dev("ipc"), "--enable-sleep-mode") as server, sender("ipc", server.url) as sends:
        info = httpx.get(f"{server.url}/server_info?config_format=json", timeout=60).json()
        assert info["vllm_config"]["weight_transfer_config"] == {"backend": "ipc"}
        good = tensors(b)
        name = next(iter(good))
        wrong: list[tuple[dict[str, torch.Tensor], str]] = [
            (
                {one: value for one, value in good.items() if one != name},
                f"1 tensor missing: {name.removeprefix('model.')}",
            ),
            ({**good, "model.wings.weight": torch.zeros(2)}, "does not have: model.wings.weight"),
            ({**good, name: good[name][:-1]}, "of another shape"),
            ({**good, name: good[name].to(torch.int8)}, "I8"),
            ({**good, name: torch.full_like(good[name], torch.nan)}, "NaN"),
        ]
        for given, said in wrong:
            with pytest.raises(Refused, match=said):
                sends.send(given.items(), "wrong")
        assert greedy(server) == first
        assert versions(server)[0] == "0"
        with pytest.raises(Refused, match=r"is in received-00000\.safetensors too"):
            _send_twice(sends, {name: good[name]})
        sends.send(good.items(), "one")
        assert greedy(server) == second
        kill(server, "worker")
        assert settled(server) == "one"
        assert greedy(server) == second
        assert kept(server) == 1
        sends.send(tensors(c).items(), "two")
        assert (greedy(server), kept(server)) == (third, 1)
        post(server, "/sleep?level=2")
        post(server, "/wake_up?tags=weights")
        sends.send(((one, value.double()) for one, value in good.items()), "three")
        post(server, "/wake_up?tags=kv_cache")
        assert greedy(server) == second
        post(server, "/update_weights_from_disk", {"model_path": c})
        assert (greedy(server), kept(server)) == (third, 0)
        run_dir = server.run_dir
    assert not received.folder_of(Path(run_dir)).exists()


def _send_twice(sends: Any, given: dict[str, torch.Tensor]) -> None:
    path = received.MEMORY / f"test-{os.getpid()}"
    path.write_bytes(example.as_bytes(list(given.items())).numpy().tobytes())
    try:
        bucket = {"name": path.name, "count": len(given)}
        told = {**example.told(list(given.items())), "buckets": [bucket]}
        with sends.mesh.update("twice"):
            for _ in range(2):
                sends.mesh.post("/update_weights", {"update_info": told})
    finally:
        path.unlink()


def test_a_trainer_s_steps_that_are_refused(models: Models) -> None:
    (a, b, _), (first, _, _) = models
    nccl = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    one = {"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]]}
    with serving(a, *dev("gloo")) as server:
        for info, said in (
            ({**nccl, "rank_offset": 0}, "rank_offset: it must be 1 or more"),
            ({**nccl, "world_size": 1}, "world_size: 1 ranks from 1 on have no place for the 1 workers"),
            ({name: value for name, value in nccl.items() if name != "master_port"}, "master_port: it is missing"),
            ({**nccl, "backend": "nccl"}, "backend: --weight-transfer-config says 'gloo'"),
        ):
            assert said in str(post(server, "/init_weight_transfer_engine", {"init_info": info}, 409))
        assert "comes first" in str(post(server, "/update_weights", {"update_info": one}, 409))
        for update, said in (
            ({**one, "shapes": []}, "shapes: it has 0 entries, and names has 1"),
            ({**one, "dtype_names": ["float31"]}, "'float31' of x is none of"),
            ({**one, "buckets": [{"name": "x", "count": 1}]}, "buckets: it is of the backend ipc"),
            ({**one, "path": b}, "weights come from a folder (path) or as tensors"),
            (one, "in no trainer's group"),
        ):
            post(server, "/start_weight_update")
            assert said in str(post(server, "/update_weights", {"update_info": update}, 409))
            httpx.post(f"{server.url}/finish_weight_update", json={"abort": True}, timeout=60)
        assert greedy(server) == first


def dies_in_a_broadcast(server: Serving, sends: Any, role: str) -> str:
    """The trainer has told what comes and is computing it, and a process dies: what its call ends with, after how long."""
    told = {"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]]}
    with ThreadPoolExecutor(1) as pool:
        sends.mesh.post("/start_weight_update", {})
        asked = pool.submit(sends.mesh.post, "/update_weights", {"update_info": told})
        until(lambda: "receiving" in (httpx.get(f"{server.url}/weight_info", timeout=60).json()["updating"] or ""))
        pid = server.pid(role) if role else 0
        if role:
            os.kill(pid, signal.SIGKILL)
        else:  # the trainer hangs, and another one ends its turn
            post(server, "/finish_weight_update", {"abort": True})
        died = time.monotonic()
        error = asked.exception(timeout=120)
        assert time.monotonic() - died < (NOTICED_S if role != "coordinator" else 60), error
    until(lambda: pid not in [one["pid"] for one in server.status()["processes"]], 60)
    return str(error)


@pytest.mark.parametrize("flags", [("-tp", "2"), ("-dp", "2")])
def test_broadcasts(models: Models, flags: tuple[str, ...]) -> None:
    """Whatever dies while tensors come, the trainer is told soon, the mesh has one version, and the next update works."""
    (a, b, c), (_, second, third) = models
    with serving(a, *dev("gloo"), *flags) as server:
        with sender("gloo", server.url) as sends:
            sends.send(tensors(b).items(), "one")
            assert greedy(server) == second
            example.BUFFER_BYTES, before = 1000, example.BUFFER_BYTES
            sends.send(tensors(c).items(), "two", mode="wait")
            example.BUFFER_BYTES = before
            assert greedy(server) == third
        for role, said in (
            ("worker", "worker"),
            ("scheduler", "died before it answered"),
            ("coordinator", "comes first"),
        ):
            with sender("gloo", server.url) as sends:
                assert said in dies_in_a_broadcast(server, sends, role)
            assert settled(server) == "two"
        with sender("gloo", server.url) as sends:
            assert "dropped" in dies_in_a_broadcast(server, sends, "")
        assert greedy(server) == third
        with sender("gloo", server.url) as sends:
            sends.send(tensors(b).items(), "three")
        assert greedy(server) == second
