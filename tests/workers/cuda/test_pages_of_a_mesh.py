"""Meshes on GPUs whose KV pages move: what was evicted comes back from the store, and one rank decodes what another has computed; the
tokens are those without, whoever is killed. Of a small model with random weights in float32.
"""

import os
import re
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from serving import Serving, serving
from split_models import greedy, small_model
from waiting import until

pytestmark = pytest.mark.gpu
FLAGS = (
    *("--device", "cuda", "--load-format", "dummy", "--dtype", "float32", "--standby-roles", "none"),
    *(
        "--kv-cache-memory",
        "64M",
        "--max-model-len",
        "512",
        "--max-num-batched-tokens",
        "128",
        "--max-num-seqs",
        "16",
        "--max-restarts",
        "100",
    ),
)
FEW = ("--num-gpu-blocks-override", "40", "--kv-offloading-size", "0.25")  # room for two prompts
ROLES = ("-dp", "2", "--dp-roles", "prefill:1,decode:1")
PROMPTS = [[3 + (7 * i + number) % 200 for i in range(300 + number)] for number in range(6)]
OTHERS = [[5 + (11 * i + number) % 180 for i in range(300 + number)] for number in range(3)]
NUM_BLOCKS = 18  # whole ones of a prompt


def metric(server: Serving, name: str, labels: str = "") -> float:
    """The sum over all series of this metric with these labels."""
    text = httpx.get(f"{server.url}/metrics", timeout=300).text
    lines = re.findall(rf"^meshlm:{re.escape(name)}\{{(.*)\}} (\S+)$", text, re.M)
    return sum(float(value) for found, value in lines if labels in found)


def one_by_one(server: Serving, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    return [greedy(server, [prompt])[0] for prompt in prompts]


def kill(server: Serving, role: str, index: int = 0) -> None:
    """And wait until its successor is ready."""

    def pid() -> int:
        for process in server.status()["processes"]:
            if (process["role"], process["index"], process["state"]) == (role, index, "ready"):
                return int(process["pid"])
        return 0

    until(lambda: pid() > 0, limit_s=90)
    before = pid()
    os.kill(before, signal.SIGKILL)
    until(lambda: pid() not in (0, before), limit_s=90)


def test_what_was_evicted_comes_back_whoever_dies(tmp_path: Path) -> None:
    model = small_model(tmp_path, "llama")
    with serving(model, *FLAGS, *FEW) as server:
        wanted = one_by_one(server)

        def all_saved() -> bool:
            return metric(server, "kv_store_pages", 'state="stored"') >= len(PROMPTS) * NUM_BLOCKS

        until(all_saved, limit_s=30)
        assert one_by_one(server) == wanted
        found = metric(server, "external_prefix_cache_hits_total")
        assert found >= 16 * (NUM_BLOCKS - 1) * (len(PROMPTS) - 2), "too little came back from the store"
        kill(server, "worker")
        assert one_by_one(server) == wanted
        assert metric(server, "external_prefix_cache_hits_total") > found, "the store outlives workers"
        with ThreadPoolExecutor(1) as pool:
            said = pool.submit(one_by_one, server)
            kill(server, "store")
            assert said.result(timeout=300) == wanted
        assert one_by_one(server) == wanted
        until(all_saved, limit_s=30)
        assert one_by_one(server) == wanted


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_one_rank_decodes_what_another_has_computed(
    num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two GPUs, and on one: of the names in CUDA_VISIBLE_DEVICES, CUDA shows those before the first that is not there."""
    if torch.cuda.device_count() < num_gpus:
        pytest.skip("needs several CUDA devices")
    if num_gpus == 1:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,99")
    model = small_model(tmp_path, "llama")
    with serving(model, *FLAGS) as server:
        wanted, wanted_of_others = one_by_one(server), one_by_one(server, OTHERS)
    with serving(model, *FLAGS, *ROLES) as server:
        assert one_by_one(server) == wanted
        assert metric(server, "request_hand_offs_total", 'engine="0"') == len(PROMPTS)
        assert metric(server, "kv_loaded_blocks_total", 'engine="1"') >= len(PROMPTS) * NUM_BLOCKS
        for index in range(2):
            with ThreadPoolExecutor(1) as pool:
                said = pool.submit(one_by_one, server)
                kill(server, "worker", index)
                assert said.result(timeout=300) == wanted
        before = metric(server, "kv_loaded_blocks_total", 'engine="1"')
        assert one_by_one(server, OTHERS) == wanted_of_others
        loaded = metric(server, "kv_loaded_blocks_total", 'engine="1"') - before
        assert loaded >= len(OTHERS) * NUM_BLOCKS, "new workers read one another's memory"
