"""examples/plugin, installed as its users would, served through a mesh."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serving import serving
from split_models import FLAGS, PROMPTS, SHAPE, greedy, reference, small_model

pytestmark = pytest.mark.mesh
PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, source = tmp_path / "site", tmp_path / "plugin"
    shutil.copytree(PLUGIN, source)  # setuptools builds in it
    here = ["--no-index", "--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", *here, "--target", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")])))


@pytest.mark.usefixtures("installed")
def test_an_architecture_from_another_package(tmp_path: Path) -> None:
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
    with serving(str(tiny), "--load-format", "dummy", *FLAGS) as server:
        assert greedy(server, PROMPTS[:1]) == [expected]
        asked = {"prompt": PROMPTS[0], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
        for target in (7, 9):  # the package's logits processor, beside a request that it does not want
            body = {**asked, "vllm_xargs": {"target_token": target}}
            (choice,) = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
            assert choice["token_ids"] == [target] * 4
            assert min(choice["logprobs"]["token_logprobs"]) < 0, "those of the model itself"
        wrong = httpx.post(
            f"{server.url}/v1/completions", json={**asked, "vllm_xargs": {"target_token": "x"}}, timeout=60
        )
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "vllm_xargs")
        assert greedy(server, PROMPTS[:1]) == [expected]
