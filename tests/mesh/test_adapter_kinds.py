"""Adapters of all kinds in a whole mesh of two tensor ranks with drafts: found by their names, with other weights, and under kills."""

import copy
import os
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from adapters import save_adapters
from changing_weights import post, write
from serving import Serving, serving
from split_models import COUNT, FLAGS
from waiting import until

pytestmark = pytest.mark.mesh
CALL = [9, 8, 9]
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "target_modules": ["q_proj", "o_proj", "up_proj"]},
    "dora": {"r": 4, "target_modules": ["v_proj", "o_proj", "down_proj"], "use_dora": True},
    "called": {"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "alora_invocation_tokens": CALL},
    "tables": {"r": 4, "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
}
BEFORE = [(7 + 31 * at) % 200 for at in range(37)]
PROMPTS = [[*BEFORE, *CALL, 5, 6], [3, 4, 5, 3, 4, 5, 3, 4, 5, *CALL, 3], BEFORE[:20]]
LORA = ("--enable-lora", "--max-loras", "3", "--allow-runtime-lora-updating", "--lora-resolver-dir")
MORE = ("--tensor-parallel-size", "2", "--speculative-config", '{"method": "suffix", "num_speculative_tokens": 3}')


class Theirs:
    """peft's modules on the weights of one folder."""

    def __init__(self, model: Path, adapters: Path) -> None:
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.models = {
            name: save_adapters(copy.deepcopy(base), adapters, {name: config}, 0.1) for name, config in CONFIGS.items()
        }

    def check(self, name: str, prompt: list[int], tokens: list[int]) -> None:
        """Each token is the likeliest behind those before it."""
        assert len(tokens) == COUNT
        theirs, text = self.models[name], torch.tensor([prompt + tokens[:-1]])
        more: dict[str, Any] = {}
        if name == "called":
            places = [at for at in range(len(prompt)) if prompt[at : at + len(CALL)] == CALL]
            more = {"alora_offsets": [len(text[0]) - places[-1] if places else None]}
        with torch.no_grad():
            logits = theirs(text, **more).logits
        assert logits[0, len(prompt) - 1 :].argmax(-1).tolist() == tokens, name


def asked(server: Serving, name: str, prompt: list[int]) -> tuple[list[int], int]:
    body = {"model": name, "prompt": prompt, "max_tokens": COUNT, "ignore_eos": True, "temperature": 0}
    body["return_token_ids"] = True
    answers: list[httpx.Response] = []

    def is_taken() -> bool:  # a mesh of which processes were just killed may refuse: clients ask again
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=300))
        return answers[-1].status_code != 503

    until(is_taken, 120)
    answer = answers[-1]
    assert answer.status_code == 200, answer.text
    found = answer.json()
    cached = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return found["choices"][0]["token_ids"], cached


def check_all(server: Serving, theirs: Theirs) -> None:
    work = [(name, prompt) for prompt in PROMPTS for name in CONFIGS]
    with ThreadPoolExecutor(len(work)) as pool:
        answers = list(pool.map(lambda one: asked(server, *one)[0], work))
    for (name, prompt), tokens in zip(work, answers, strict=True):
        theirs.check(name, prompt, tokens)


def test_kinds_of_adapters_in_a_mesh(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for seed, folder in enumerate(folders):
        write(folder, seed)
    first = Theirs(folders[0], tmp_path / "adapters")
    second = Theirs(folders[1], tmp_path / "again")  # the same A and B, but lengths of DoRA
    flags = (*FLAGS, *MORE, "--cpu-exact", "--server-dev-mode", *LORA)
    with serving(str(folders[0]), *flags, str(tmp_path / "adapters")) as server:
        base = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]["id"]
        for name, status in (("none", 404), ("../adapters/plain", 404), ("a" * 300, 404)):
            answer = httpx.post(f"{server.url}/v1/completions", json={"model": name, "prompt": [3]}, timeout=60)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, "model")
        (tmp_path / "adapters" / "bad").mkdir()
        (tmp_path / "adapters" / "bad" / "adapter_config.json").write_text("{}")
        answer = httpx.post(f"{server.url}/v1/completions", json={"model": "bad", "prompt": [3]}, timeout=60)
        assert answer.status_code == 400
        assert "peft_type is None" in answer.json()["error"]["message"]
        check_all(server, first)
        cards = {card["id"]: card["parent"] for card in httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]}
        assert cards == {base: None, **dict.fromkeys(CONFIGS, base)}
        own = [11 + at % 150 for at in range(48)]
        asked(server, base, own)
        tokens, cached = asked(server, "called", [*own, *CALL])
        assert cached == 48, "the base's KV up to the invocation"
        first.check("called", [*own, *CALL], tokens)
        assert asked(server, "plain", own)[1] == 0
        for role in ("worker", "scheduler", "detokenizer", "coordinator"):
            with ThreadPoolExecutor(4) as pool:
                work = [(name, pool.submit(asked, server, name, PROMPTS[0])) for name in CONFIGS]
                os.kill(server.pid(role), signal.SIGKILL)
                for name, answer_of in work:
                    first.check(name, PROMPTS[0], answer_of.result(timeout=300)[0])
        post(server, "/update_weights_from_disk", {"model_path": str(folders[1])})
        for name in ("plain", "called", "tables"):
            second.check(name, PROMPTS[1], asked(server, name, PROMPTS[1])[0])
        check_dora(second, tmp_path, asked(server, "dora", PROMPTS[1])[0])


def check_dora(theirs: Theirs, folder: Path, tokens: list[int]) -> None:
    """The adapter as it was made for the first weights, in a model of the second."""
    import peft

    base = theirs.models["dora"].unload()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, whose older names peft uses
        theirs.models["dora"] = peft.PeftModel.from_pretrained(base, folder / "adapters" / "dora").eval()
    theirs.check("dora", PROMPTS[1], tokens)
