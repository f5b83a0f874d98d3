"""examples/plugin, installed as its users would, served through a mesh."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from example_plugin import install
from serving import Serving, serving
from split_models import FLAGS, PROMPTS, SHAPE, greedy, reference, small_model

pytestmark = pytest.mark.mesh


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("plugin"))


@pytest.fixture
def installed(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where its processes leave notes."""
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("MESHLM_TINY_NOTES", str(notes))
    monkeypatch.setenv("MESHLM_TINY_FIGURES", str(notes / "figures"))
    return notes


def test_plug_ins_of_another_package(tmp_path: Path, installed: Path) -> None:
    tiny, llama = tmp_path / "tiny", tmp_path / "llama"
    for folder in (tiny, llama):
        folder.mkdir()
    expected = reference(small_model(llama, "llama"), PROMPTS[0])
    text = (llama / "config.json").read_text()
    for ours, theirs in (
        ("num_hidden_layers", "num_blocks"),
        ("LlamaForCausalLM", "TinyForCausalLM"),
        ('"llama"', '"tiny"'),
    ):
        text = text.replace(ours, theirs)
    (tiny / "config.json").write_text(text)
    (tiny / "tokenizer.json").write_text((llama / "tokenizer.json").read_text())
    assert f'"num_blocks": {SHAPE["num_hidden_layers"]}' in text
    flags = (
        "--load-format",
        "dummy",
        "--attention-backend",
        "tiny_attention",
        *FLAGS,
        "--device",
        "tiny",
    )  # the package's own
    with serving(str(tiny), *flags) as server:
        assert greedy(server, PROMPTS[:1]) == [expected]
        asked = {"prompt": PROMPTS[0], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
        for target in (7, 9):  # the package's logits processor, beside a request that it does not want
            body = {**asked, "vllm_xargs": {"target_token": target}}
            (choice,) = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()["choices"]
            assert choice["token_ids"] == [target] * 4
            assert min(choice["logprobs"]["token_logprobs"]) < 0, "those of the model itself"
        wrong = httpx.post(
            f"{server.url}/v1/completions", json={**asked, "vllm_xargs": {"target_token": "x"}}, timeout=60
        )
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "vllm_xargs")
        assert greedy(server, PROMPTS[:1]) == [expected]
        pids = {process["pid"] for process in server.status()["processes"]}
        greeted = {int(path.name.partition("-")[2]) for path in installed.glob("hello-*")}
        assert pids <= greeted, "every process ran the general plug-in"
        lines = [json.loads(line) for line in (installed / "figures").read_text().splitlines()]
        assert {"path": "/v1/completions", "output_tokens": 4, "frontend": 0} in lines
        assert any("running" in line for line in lines)


NEAREST = """
from meshlm import LLM
llm = LLM("", device="fake", runner="pooling", io_processor_plugin="tiny_nearest", max_model_len=256)
(found,) = llm.encode({"data": {"question": "a cat", "texts": ["a dog", "a cat"]}})
print(found.outputs["nearest"], len(found.outputs["nearness"]))
try:
    llm.encode({"data": {"question": "alone"}})
except ValueError as error:
    print(error)
"""


def test_a_drafter_of_another_package(tmp_path: Path, installed: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    expected = reference(small_model(folder, "llama"), PROMPTS[0])
    with serving(
        str(folder), *FLAGS, "--load-format", "dummy", "--spec-method", "tiny_echo", "--spec-tokens", "2"
    ) as server:
        assert greedy(server, PROMPTS[:1]) == [expected]
        drafted = [
            line
            for line in httpx.get(f"{server.url}/metrics").text.splitlines()
            if "spec_decode_num_draft_tokens" in line
        ]
        assert any(float(line.rpartition(" ")[2]) for line in drafted if not line.startswith("#"))


def test_pages_in_a_folder_outlive_the_mesh(installed: Path, tmp_path: Path) -> None:
    """Whoever is started again finds them; what was changed there is computed."""
    folder, prompt = tmp_path / "kv", list(range(300, 365))
    options = {"kv_connector": "tiny_folder", "kv_connector_extra_config": {"folder": str(folder)}}
    flags = ("--device", "fake", "--kv-transfer-config", json.dumps(options))
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}

    def ask(server: Serving) -> tuple[list[int], int]:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def saved() -> list[Path]:
        return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("tmp")]

    with serving(*flags) as server:
        text, cached = ask(server)
        assert cached == 0
        limit = time.monotonic() + 60
        while len(saved()) < 4:
            assert time.monotonic() < limit
            time.sleep(0.02)
    with serving(*flags) as server:
        assert ask(server) == (text, 64)
    for path in saved():
        path.write_bytes(b"x" + path.read_bytes()[1:])
    with serving(*flags) as server:
        assert ask(server) == (text, 0)


def test_an_io_processor_by_http_and_in_python(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "nearest.py").write_text(NEAREST)
    command = [sys.executable, "-P", str(tmp_path / "nearest.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == ["1 2", "an object with question and texts is expected"], done.stderr
    flags = ("--device", "fake", "--runner", "pooling", "--max-model-len", "256")
    with serving(*flags, "--io-processor-plugin", "tiny_nearest") as server:
        body = {"data": {"question": "a cat", "texts": ["a dog", "a cat"]}}
        answer = httpx.post(f"{server.url}/pooling", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        assert answer.json()["data"]["nearest"] == 1
        assert httpx.post(f"{server.url}/pooling", json={"input": "a"}, timeout=300).json()["data"][0]["data"]
        for wrong, param in (({"data": {"question": 5}}, "data"), ({**body, "input": "a"}, "input")):
            refused = httpx.post(f"{server.url}/pooling", json=wrong, timeout=300)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def test_routes_of_another_package(tmp_path: Path, installed: Path) -> None:
    """Those of trl's older clients, in the example."""
    small_model(tmp_path, "llama")
    with serving(
        str(tmp_path), *FLAGS, "--load-format", "dummy", "--server-dev-mode", "--chat-template", TEMPLATE
    ) as server:

        def ask(path: str, body: object = None) -> httpx.Response:
            return httpx.request("GET" if body is None else "POST", f"{server.url}{path}", json=body, timeout=300)

        assert ask("/health/").json() == {"status": "ok"}
        assert ask("/get_world_size/").json() == {"world_size": 1}
        more = {"ignore_eos": True}
        asked = {"prompts": PROMPTS[:2], "n": 2, "max_tokens": 4, "temperature": 0, "generation_kwargs": more}
        answer = ask("/generate/", asked)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["prompt_ids"] == PROMPTS[:2]
        assert [len(ids) for ids in found["completion_ids"]] == [4] * 4
        assert found["completion_ids"][::2] == [one[:4] for one in greedy(server, PROMPTS[:2])]
        assert all(one <= 0 for row in found["logprobs"] for one in row)
        empty = ask("/chat/", {"messages": [[{"role": "user", "content": ""}]], "max_tokens": 3})
        assert empty.status_code == 400, "this tokenizer has no words; tests/frontend/test_endpoints.py reads an answer"
        assert "the prompt is empty" in empty.text
        assert ask("/reset_prefix_cache/", {}).status_code == 200
        refused = ask("/init_communicator/", {"host": "0.0.0.0", "port": 1, "world_size": 2})
        assert refused.status_code == 400
        assert "/init_weight_transfer_engine" in refused.text
        assert ask("/generate/", {"prompts": []}).status_code == 400
        assert ask("/generate/", {"prompts": PROMPTS[:1], "temperature": -1}).status_code == 400
