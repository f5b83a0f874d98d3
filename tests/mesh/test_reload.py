"""POST /collective_rpc reload_weights: both workers of a rank have the new weights before the same step, and after a death too."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from serving import Serving, serving
from split_models import COUNT, FLAGS, PROMPTS, SHAPE, greedy, small_model

pytestmark = pytest.mark.mesh


def write(folder: Path, seed: int) -> list[list[int]]:
    """A model's files, and its greedy tokens."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**SHAPE, "initializer_range": 0.2}, eos_token_id=None, bos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(folder)
    found = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        ids = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=COUNT, do_sample=False)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def reload(server: Serving) -> httpx.Response:
    return httpx.post(f"{server.url}/collective_rpc", json={"method": "reload_weights"}, timeout=120)


def test_reload_of_two_workers_and_a_death_in_between(tmp_path: Path) -> None:
    small_model(tmp_path, "llama")  # for its tokenizer
    first = write(tmp_path, 0)
    with serving(str(tmp_path), *FLAGS, "-tp", "2", "--server-dev-mode") as server:
        assert greedy(server) == first
        second = write(tmp_path, 1)
        assert first != second
        answer = reload(server)
        assert (answer.status_code, answer.json()) == (200, {"results": [None, None]})
        assert greedy(server) == second, "what was computed with the old weights is forgotten"
        third = write(tmp_path, 2)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(reload, server)
            victim = next(int(one["pid"]) for one in server.status()["processes"] if one["role"] == "worker")
            os.kill(victim, signal.SIGKILL)  # before, while or after they are read: all workers of its rank start again
            assert asked.result().status_code in (200, 409, 503)
        assert greedy(server) == third, "one version, whenever it was"
        (tmp_path / "model.safetensors").write_bytes(b"cut")
        answer = reload(server)
        assert answer.status_code == 409
        assert "model.safetensors: cannot be read" in answer.text
        assert greedy(server) == third
