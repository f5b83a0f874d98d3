"""Weights that change while a mesh serves: it never has two models, whatever dies, comes, sleeps or is refused."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from changing_weights import (
    EXTENSION,
    Models,
    call,
    kill,
    not_ready,
    pinned,
    post,
    three_models,
    update,
    versions,
    write,
)
from serving import MESHLM, Serving, serving
from split_models import FLAGS, PROMPTS, greedy
from waiting import until

pytestmark = pytest.mark.mesh
models = pytest.fixture(scope="module")(three_models)
DEV = (*FLAGS, "--server-dev-mode")


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    (tmp_path / "changes_of_weights.py").write_text(EXTENSION)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "--worker-extension-cls", "changes_of_weights.Changes"


def scale(server: Serving, num_ranks: int) -> None:
    command = [MESHLM, "scale", "--dp", str(num_ranks), "--run-dir", server.run_dir]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/", check=False)
    assert done.returncode == 0, done.stderr


def test_what_only_memory_had_is_gone_with_a_worker_and_nobody_answers_in_its_place(
    models: Models, extension: tuple[str, str]
) -> None:
    (a, b, _), (first, second, _) = models
    with serving(a, *DEV, *extension) as server:
        assert greedy(server) == first
        assert int(str(call(server, "look")[0])) > 0
        assert versions(server)[0] == "0", "a method that changes nothing makes no version"
        call(server, "negate")
        until(lambda: versions(server) == ("1", [("1", "")]))
        assert greedy(server) != first
        kill(server, "worker")
        until(lambda: "memory of workers alone" in not_ready(server), 60)
        update(server, b, "from-disk")
        assert greedy(server) == second
        assert versions(server) == ("from-disk", [("from-disk", "")])


def test_ranks_that_come_have_the_weights_of_the_mesh(models: Models, extension: tuple[str, str]) -> None:
    (a, b, _), (first, second, _) = models
    with serving(a, *DEV, *extension) as server:
        update(server, b, "b")
        scale(server, 2)
        assert [pinned(server, rank) for rank in (0, 1)] == [second[0], second[0]]
        call(server, "negate")
        changed = pinned(server, 0)
        assert changed not in (first[0], second[0])
        kill(server, "coordinator")
        scale(server, 1)
        scale(server, 2)
        until(lambda: any("memory of workers alone" in behind for _, behind in versions(server)[1]), 60)
        assert greedy(server)[0] == changed, "the rank that has other weights gets no request"
        update(server, b, "again")
        until(lambda: versions(server) == ("again", [("again", "")] * 2))
        assert [pinned(server, rank) for rank in (0, 1)] == [second[0], second[0]]


def test_sleep_of_level_2_wakes_with_the_weights_that_fell_asleep(models: Models) -> None:
    (a, b, c), (_, second, third) = models
    with serving(a, *DEV, "--enable-sleep-mode") as server:
        update(server, b)
        for level in (2, 1):
            post(server, f"/sleep?level={level}")
            post(server, "/wake_up")
            assert greedy(server) == second
        for level, (folder, tokens) in ((2, (c, third)), (1, (b, second))):
            post(server, f"/sleep?level={level}")
            post(server, "/wake_up?tags=weights")
            update(server, folder, f"level-{level}")
            post(server, "/wake_up?tags=kv_cache")
            assert greedy(server) == tokens
        post(server, "/sleep")
        found = post(server, "/update_weights_from_disk", {"model_path": c}, 409)
        assert "sleep" in str(found)
        post(server, "/wake_up")
        assert greedy(server) == second


@pytest.mark.parametrize("role", ["worker", "scheduler", "coordinator"])
def test_a_death_in_an_update_leaves_one_version(models: Models, role: str) -> None:
    (a, b, _), (first, second, _) = models
    with serving(a, *DEV, "-dp", "2") as server, ThreadPoolExecutor(1) as pool:
        body = {"model_path": b, "weight_version": "new"}
        asked = pool.submit(httpx.post, f"{server.url}/update_weights_from_disk", json=body, timeout=300)
        kill(server, role)
        is_new = asked.result().status_code == 200
        until(lambda: {version for version, _ in versions(server)[1]} == {versions(server)[0]}, 60)
        tokens = [pinned(server, rank) for rank in (0, 1)]
        assert tokens[0] == tokens[1] == (second if is_new else first)[0]
        update(server, b)
        assert [pinned(server, rank) for rank in (0, 1)] == [second[0], second[0]]


def test_a_trainer_s_steps_and_what_is_refused(models: Models, tmp_path: Path) -> None:
    """Under vLLM's names. What is wrong changes nothing."""
    (a, b, c), (first, second, _) = models
    with serving(a, *DEV) as server:
        post(server, "/init_weight_transfer_engine", {"init_info": {"backend": "disk"}})
        nccl = {"init_info": {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}}
        assert "init_info.master_address" in str(post(server, "/init_weight_transfer_engine", nccl, 409))
        for path, body in (("/update_weights", {"update_info": {"path": b}}), ("/finish_weight_update", {})):
            assert "/start_weight_update comes first" in str(post(server, path, body, 409))
        post(server, "/start_weight_update")
        assert "another trainer updates the weights" in str(post(server, "/start_weight_update", {}, 409))
        assert "another trainer" in str(post(server, "/update_weights_from_disk", {"model_path": c}, 409))
        tensors = {"update_info": {"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]]}}
        assert "update_info.names: tensors are not sent here" in str(post(server, "/update_weights", tensors, 409))
        for wrong in (str(tmp_path / "nowhere"), str(tmp_path)):
            assert wrong in str(post(server, "/update_weights", {"update_info": {"path": wrong}}, 409))
        cut = tmp_path / "cut"
        write(cut, 5)
        (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
        assert "model.safetensors" in str(post(server, "/update_weights", {"update_info": {"path": str(cut)}}, 409))
        post(server, "/update_weights", {"update_info": {"path": b}})
        assert greedy(server) == first, "nothing has changed yet"
        post(server, "/finish_weight_update", {"weight_version": "step-1"})
        assert greedy(server) == second
        assert "comes first" in str(post(server, "/finish_weight_update", {}, 409))
        post(server, "/update_weight_version", {"new_version": "renamed"})
        until(lambda: versions(server) == ("renamed", [("renamed", "")]))
        sums = post(server, "/weight_checker", {"action": "checksum"})["checksums"]
        update(server, c)
        assert post(server, "/weight_checker")["checksums"] != sums
        update(server, b)
        assert post(server, "/weight_checker")["checksums"] == sums
        assert "snapshot" in str(post(server, "/weight_checker", {"action": "snapshot"}, 409))
        info = httpx.get(f"{server.url}/server_info").json()
        assert info["weight_version"] == versions(server)[0]
        assert httpx.post(f"{server.url}/update_named_param/", json={}).status_code == 404


def test_running_requests_by_policy(models: Models) -> None:
    (a, b, _), (first, second, _) = models
    body = {"prompt": PROMPTS[1], "max_tokens": 200, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    with serving(a, *DEV) as server, ThreadPoolExecutor(1) as pool:
        for mode in ("keep", "wait", "abort"):
            update(server, a, "old")
            running = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=300)
            until(
                lambda: "meshlm:num_requests_running{" in httpx.get(f"{server.url}/metrics").text and is_running(server)
            )
            update(server, b, "new", mode=mode)
            answer = running.result().json()
            choice, told = answer["choices"][0], answer["choices"][0]["weights_versions"]
            if mode == "keep" and len(told) > 1:
                assert [name for _, name in told] == ["old", "new"]
                assert choice["token_ids"][: told[1][0]][:24] == first[1][: told[1][0]]
                assert answer["usage"]["weights_version"] == "new"
            elif mode != "keep":
                assert told == [[0, "old"]]
                assert (
                    choice["finish_reason"] == ("length" if mode == "wait" else "abort")
                    or len(choice["token_ids"]) == 200
                )
            assert greedy(server) == second


def test_the_store_finds_nothing_that_other_weights_computed(models: Models) -> None:
    (a, b, _), (first, second, _) = models
    with serving(a, *DEV, "--kv-offloading-size", "0.05") as server:
        for folder, tokens in ((a, first), (b, second), (a, first)):
            update(server, folder)
            for _ in range(2):
                post(server, "/reset_prefix_cache")
                before = num_loaded(server)
                assert greedy(server) == tokens
            assert num_loaded(server) > before, "what these weights computed is found"


def num_loaded(server: Serving) -> float:
    """Tokens whose KV came from the store."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    name = "meshlm:external_prefix_cache_hits_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def is_running(server: Serving) -> bool:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return any(line.startswith("meshlm:num_requests_running{") and not line.endswith(" 0.0") for line in lines)


def test_ranks_that_share_experts_change_before_the_same_step(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    first, second = (write(folder, seed, experts=True) for seed, folder in enumerate(folders))
    flags = ("-dp", "2", "--enable-expert-parallel", "--enable-sleep-mode")
    with serving(str(folders[0]), *DEV, *flags) as server:
        assert [pinned(server, rank) for rank in (0, 1)] == [first[0]] * 2
        update(server, str(folders[1]), "new")
        assert [pinned(server, rank) for rank in (0, 1)] == [second[0]] * 2
        kill(server, "worker")
        assert [pinned(server, rank) for rank in (0, 1)] == [second[0]] * 2
        post(server, "/sleep?level=2")
        post(server, "/wake_up?tags=weights")
        update(server, str(folders[0]), "old")
        post(server, "/wake_up?tags=kv_cache")
        assert [pinned(server, rank) for rank in (0, 1)] == [first[0]] * 2


def test_a_mesh_that_began_without_weights_gets_some(models: Models) -> None:
    """With --load-format dummy, as trainers begin."""
    (a, b, _), (_, second, _) = models
    with serving(a, *DEV, "--load-format", "dummy") as server:
        update(server, b, "first")
        assert greedy(server) == second
        kill(server, "worker")
        assert greedy(server) == second
