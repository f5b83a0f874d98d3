"""Models with the same shape and other weights, and a worker extension that changes them in memory."""

import os
import signal
from pathlib import Path

import httpx
import pytest
import torch
from serving import Serving
from split_models import COUNT, PROMPTS, SHAPE, small_model

Models = tuple[list[str], list[list[list[int]]]]
EXTENSION = """
import torch

class Changes:
    def negate(self):
        with torch.inference_mode():
            for name, parameter in self.model.named_parameters():
                if "norm" in name:
                    parameter[::2].neg_()

    def look(self):
        return len(list(self.model.parameters()))
"""


EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "head_dim": 16,
}


def write(folder: Path, seed: int, *, experts: bool = False) -> list[list[int]]:
    """A model's files in this folder, and its greedy tokens."""
    import transformers

    folder.mkdir(exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        small_model(folder, "llama")
    torch.manual_seed(seed)
    kind = transformers.Qwen3MoeConfig if experts else transformers.LlamaConfig
    shape = {**SHAPE, "initializer_range": 0.2, **(EXPERTS if experts else {})}
    model = transformers.AutoModelForCausalLM.from_config(kind(**shape, eos_token_id=None, bos_token_id=None)).float()
    model.save_pretrained(folder)
    return [greedy_of(model, prompt) for prompt in PROMPTS]


def greedy_of(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    given = torch.tensor([prompt])
    ids = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=COUNT, do_sample=False)  # type: ignore[operator]
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


def post(server: Serving, path: str, body: object = None, status: int = 200) -> dict[str, object]:
    answer = httpx.post(f"{server.url}{path}", json={} if body is None else body, timeout=300)
    assert answer.status_code == status, answer.text
    found: dict[str, object] = answer.json() if answer.content else {}
    return found


def call(server: Serving, method: str) -> list[object]:
    results = post(server, "/collective_rpc", {"method": method})["results"]
    assert isinstance(results, list)
    return results


def versions(server: Serving) -> tuple[str, list[tuple[str, str]]]:
    """The mesh's version, and of each rank its own and why it has no other."""
    found = httpx.get(f"{server.url}/weight_info", timeout=60).json()
    return found["weight_version"], [(one["weight_version"], one["behind"] or "") for one in found["ranks"]]


def not_ready(server: Serving) -> str:
    """Why the mesh serves nobody; empty: it does."""
    answer = httpx.get(f"{server.url}/ready", timeout=60)
    return "" if answer.status_code == 200 else answer.text


def three_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Three folders, and the greedy tokens of each."""
    folder = tmp_path_factory.mktemp("models")
    names = [str(folder / name) for name in "abc"]
    return names, [write(Path(name), seed) for seed, name in enumerate(names)]


def kill(server: Serving, role: str) -> None:
    os.kill(server.pid(role), signal.SIGKILL)


def update(server: Serving, folder: str, name: str = "", **more: object) -> None:
    post(server, "/update_weights_from_disk", {"model_path": folder, "weight_version": name, **more})


def pinned(server: Serving, rank: int) -> list[int]:
    body = {"prompt": PROMPTS[0], "max_tokens": 24, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    headers = {"X-data-parallel-rank": str(rank)}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids
