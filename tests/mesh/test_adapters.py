"""Adapters that peft made for SmolLM2, through the whole mesh: tokens are those of peft's modules, whoever is killed meanwhile."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
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
from waiting import until

pytestmark = [pytest.mark.mesh, pytest.mark.model]
BASE, NUM_TOKENS = "SmolLM2-135M-Instruct", 24
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "one": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "two": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "three": {"r": 4, "lora_alpha": 8, "target_modules": ["down_proj", "k_proj"]},
}
PROMPTS = [[500 + 37 * nth + 11 * at for at in range(20 + 9 * nth)] for nth in range(3)]


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
    lora = ("--enable-lora", "--max-loras", "2", "--allow-runtime-lora-updating", "--lora-modules", *modules)
    with serving(*flags, "--frontends", "2", *lora) as found:
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
    again = asked(server, "one", PROMPTS[2])
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


def test_structured_outputs(server: Serving) -> None:
    """What an adapter says within a grammar is the same beside others' rows as alone."""
    pattern, names = "[a-z]{3,12} [0-9]{2,5}", (BASE, "one", "two")

    def constrained(name: str, prompt: list[int]) -> str:
        body = {"model": name, "prompt": prompt, "max_tokens": 40, "temperature": 0, "guided_regex": pattern}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    work = [(name, prompt) for name in names for prompt in PROMPTS]
    with ThreadPoolExecutor(len(work)) as pool:
        together = list(pool.map(lambda one: constrained(*one), work))
    assert all(re.fullmatch(pattern, text) for text in together), together
    assert together == [constrained(*one) for one in work]


def change(server: Serving, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}_lora_adapter", json=body, timeout=60)


def heard(server: Serving, known: bool, name: str) -> None:
    """Both frontends have the list, however the kernel spreads connections."""
    until(lambda: all((httpx.get(f"{server.url}/v1/models/{name}").status_code == 200) is known for _ in range(12)))


def test_adapters_come_and_go(server: Serving, peft: Peft) -> None:
    folder = str(peft.folder / "three")
    answer = change(server, "load", lora_name="late", lora_path=folder)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'late' added successfully.")
    heard(server, True, "late")
    peft.check(PROMPTS[1], asked(server, "late", PROMPTS[1])["choices"][0]["token_ids"], "three")
    again = change(server, "load", lora_name="late", lora_path=folder)
    assert again.status_code == 400
    assert "has already been loaded" in again.json()["error"]["message"]
    other = change(server, "load", lora_name="late", lora_path=str(peft.folder / "two"), load_inplace=True)
    assert other.status_code == 200, other.text
    until(lambda: all(httpx.get(f"{server.url}/v1/models/late").json()["root"].endswith("two") for _ in range(12)))
    found = asked(server, "late", PROMPTS[1])
    peft.check(PROMPTS[1], found["choices"][0]["token_ids"], "two")
    os.kill(server.pid("coordinator"), signal.SIGKILL)
    heard(server, True, "late")
    gone = change(server, "unload", lora_name="late")
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'late' removed successfully.")
    heard(server, False, "late")
    assert change(server, "unload", lora_name="late").status_code == 404
    check(peft, "two", PROMPTS[1], asked(server, "two", PROMPTS[1]))


def test_files_that_changed_are_a_400_that_says_so(server: Serving, peft: Peft, tmp_path: Path) -> None:
    folder = tmp_path / "changing"
    shutil.copytree(peft.folder / "three", folder)
    assert change(server, "load", lora_name="changing", lora_path=str(folder)).status_code == 200
    heard(server, True, "changing")
    shutil.copytree(peft.folder / "one", folder, dirs_exist_ok=True)
    body = {"model": "changing", "prompt": PROMPTS[2], "max_tokens": 2}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert "the files are others than when the adapter was loaded; load it again" in answer.json()["error"]["message"]
    assert change(server, "load", lora_name="changing", lora_path=str(folder), load_inplace=True).status_code == 200
    until(lambda: httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200)


def test_what_cannot_be_loaded_changes_nothing(server: Serving, tmp_path: Path) -> None:
    before = httpx.get(f"{server.url}/v1/models").json()["data"]
    for path, said in ((str(tmp_path / "none"), "there is no such folder"), (str(tmp_path), "adapter_config.json")):
        answer = change(server, "load", lora_name="bad", lora_path=path)
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
    assert change(server, "load", lora_name=BASE, lora_path=str(tmp_path)).status_code == 400
    assert change(server, "load", lora_name="bad").status_code == 400
    after = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [card["id"] for card in after] == [card["id"] for card in before]


OFFLINE = """
from meshlm import LLM, LoRARequest, SamplingParams

if __name__ == "__main__":
    import json, sys
    folder, prompt = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(device="cpu", enable_lora=True, cpu_exact=True, kv_cache_memory="500M", cpu_threads=1)
    one = LoRARequest("any", 1, folder)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = llm.generate([prompt] * 2, params, lora_request=[one, None], use_tqdm=False)
    print(json.dumps([answer.outputs[0].token_ids for answer in found]))
    try:
        llm.generate([prompt], params, lora_request=LoRARequest("any", 1, "/none"))
    except ValueError as error:
        assert "lora_request: /none: there is no such folder" in str(error), error
    else:
        raise AssertionError("it was taken")
"""


def test_lora_request_of_the_python_api(peft: Peft, tmp_path: Path) -> None:
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    command = [sys.executable, "-P", str(script), str(peft.folder / "one"), json.dumps(PROMPTS[0])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    with_adapter, without = json.loads(done.stdout.splitlines()[-1])
    peft.check(PROMPTS[0], with_adapter, "one")
    peft.check(PROMPTS[0], without, BASE)
