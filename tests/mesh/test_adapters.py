"""Adapters that peft made for SmolLM2, through the whole mesh: tokens are those of peft's modules, whoever is killed meanwhile."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from adapters import save_adapters
from serving import Serving, serving

pytestmark = [pytest.mark.mesh, pytest.mark.model]
BASE, NUM_TOKENS = "SmolLM2-135M-Instruct", 24
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "one": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "two": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "three": {"r": 4, "lora_alpha": 8, "target_modules": ["down_proj", "k_proj"]},
}
PROMPTS = [[500 + 37 * nth + 11 * at for at in range(20 + 9 * nth)] for nth in range(4)]


class Peft:
    """transformers' model of the same file, with peft's modules."""

    def __init__(self, path: Path, folder: Path) -> None:
        import transformers

        found = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        self.folder, self._model = folder, save_adapters(found.eval(), folder, CONFIGS, 0.02)
        self._right: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()

    def check(self, prompt: list[int], tokens: list[int], adapter: str) -> None:
        """Each token is the likeliest behind those before it."""
        assert len(tokens) == NUM_TOKENS
        if (key := (adapter, tuple(prompt), tuple(tokens))) in self._right:
            return
        text = torch.tensor([prompt + tokens[:-1]])
        with torch.no_grad():
            if adapter == BASE:
                with self._model.disable_adapter():
                    logits = self._model(text).logits
            else:
                self._model.set_adapter(adapter)
                logits = self._model(text).logits
        assert logits[0, len(prompt) - 1 :].argmax(-1).tolist() == tokens
        self._right.add(key)


@pytest.fixture(scope="module")
def peft(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Peft:
    return Peft(smollm2, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def server(peft: Peft) -> Iterator[Serving]:
    modules = [f"{name}={peft.folder / name}" for name in ("one", "two")]
    flags = (
        "--device",
        "cpu",
        "--cpu-threads",
        "1",
        "--cpu-exact",
        "--kv-cache-memory",
        "1G",
        "--max-num-batched-tokens",
        "64",
    )
    with serving(*flags, "--enable-lora", "--max-loras", "2", "--lora-modules", *modules) as found:
        yield found


def asked(server: Serving, model: str, prompt: list[int]) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=300)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check(peft: Peft, model: str, prompt: list[int], answer: dict[str, Any]) -> None:
    assert answer["model"] == model
    peft.check(prompt, answer["choices"][0]["token_ids"], model)


def test_they_are_listed_with_their_parent(server: Serving, peft: Peft) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert {name: card["parent"] for name, card in cards.items()} == {BASE: None, "one": BASE, "two": BASE}
    assert cards["one"]["root"] == str(peft.folder / "one")
    assert httpx.get(f"{server.url}/v1/models/two").json()["parent"] == BASE
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "four", "prompt": "a"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"The model `four` does not exist; this server has: {BASE}, one, two"


def test_rows_of_all_kinds_side_by_side(server: Serving, peft: Peft) -> None:
    """And again, behind the prefix cache, which one adapter shares with no other."""
    for _ in range(2):
        with ThreadPoolExecutor(12) as pool:
            work: list[tuple[str, list[int], Future[dict[str, Any]]]] = [
                (model, prompt, pool.submit(asked, server, model, prompt))
                for prompt in PROMPTS
                for model in (BASE, "one", "two")
            ]
        for model, prompt, answer in work:
            check(peft, model, prompt, answer.result())
    again = asked(server, "one", PROMPTS[3])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


@pytest.mark.parametrize("role", ["worker", "scheduler", "detokenizer"])
def test_a_kill_loses_nothing(server: Serving, peft: Peft, role: str) -> None:
    begun = threading.Semaphore(0)

    def stream(model: str, prompt: list[int]) -> list[int]:
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        found: list[int] = []
        more = {"stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body | more, timeout=300) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    ids = (
                        httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"][0].get("token_ids")
                        or []
                    )
                    if ids and not found:
                        begun.release()
                    found += ids
        return found

    with ThreadPoolExecutor(6) as pool:
        work = [
            (model, prompt, pool.submit(stream, model, prompt))
            for prompt in PROMPTS[:2]
            for model in (BASE, "one", "two")
        ]
        for _ in work[:3]:
            assert begun.acquire(timeout=120)
        os.kill(server.pid(role), signal.SIGKILL)
        for model, prompt, tokens in work:
            peft.check(prompt, tokens.result(timeout=300), model)
