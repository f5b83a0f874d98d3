"""`meshlm serve --dry-run` refuses, with an exit code, what a worker or detokenizer would refuse before it reads weights."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from model_folders import safetensors
from waiting import free_port

from meshlm.supervisor.cli import main

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def dry_run(folder: Path, *words: str) -> int:
    usual = ("--device", "cpu", "--load-format", "dummy", "--port", str(free_port()))
    return main.run(["serve", "--dry-run", str(folder), *usual, *words])


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def broken_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for")


def other_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(safetensors())


@pytest.mark.parametrize(
    ("change", "words", "code", "said"),
    [
        (no_tokenizer, (), 2, "no tokenizer.json there; give a folder or file that has one with --tokenizer"),
        (broken_tokenizer, (), 1, "detokenizer: {folder}/tokenizer.json: not a tokenizer"),
        (broken_template, (), 1, "detokenizer: --chat-template: not a chat template"),
        (other_weights, ("--load-format", "auto"), 1, "worker: {folder}: "),
        (None, ("--kv-cache-memory", "1K"), 1, "worker: one request of --max-model-len 64 tokens needs"),
        (None, ("-dp", "2", "-tp", "2", "--max-model-len", "auto", "--kv-cache-memory", "8K"), 0, ""),
    ],
)
def test_what_is_known_before_weights_are_read(
    change: Any, words: tuple[str, ...], code: int, said: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A start would have said it; --dry-run said that all is well."""
    if change is not None:
        change(folder)
    assert dry_run(folder, *words) == code
    out, err = capfd.readouterr()
    assert said.format(folder=folder) in err
    assert code == 2 or "processes of this node:" in out, "the plan is printed all the same"


def test_a_plug_in_of_frontends_that_cannot_be_had(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Frontends load it, so a start said it when all was ready but them."""
    site = tmp_path / "site"
    (site / "bad-1.0.dist-info").mkdir(parents=True)
    (site / "bad-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (site / "bad-1.0.dist-info" / "entry_points.txt").write_text("[meshlm.io_processors]\nbad = nowhere_at_all:Bad\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    assert dry_run(folder, "--io-processor-plugin", "bad", "--runner", "pooling") == 1
    assert "frontend: plug-in bad" in capfd.readouterr().err


def test_who_is_asked_gets_no_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are the frontends' alone."""
    asked: list[tuple[str, dict[str, str]]] = []

    class Asked:
        returncode = 0

        def __init__(self, _: list[str], stdin: int, env: dict[str, str], **__: object) -> None:
            asked.append((os.read(stdin, 1 << 20).decode(), env))

        def communicate(self, **_: object) -> tuple[bytes, bytes]:
            return b"", b""

    monkeypatch.setenv("MESHLM_ADMIN_API_KEY", "secret-admin")
    monkeypatch.setattr("meshlm.supervisor.cli.plan.subprocess.Popen", Asked)
    assert dry_run(folder, "--api-key", "secret-client") == 0
    assert len(asked) == 2
    for config, environment in asked:
        assert json.loads(config)["model"]["model"] == str(folder)
        assert "secret" not in config + str(environment)
        assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_a_node_without_detokenizers_needs_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    no_tokenizer(folder)
    assert main.run(["keys", str(tmp_path / "key")]) == 0
    words = ("--headless", "--join", "tcp://127.0.0.1:5600", "--key-file", str(tmp_path / "key"))
    assert dry_run(folder, *words, "-dp", "2", "--data-parallel-start-rank", "1") == 0
