"""`meshlm serve` that cannot start: exit code 1 (2 for wrong usage), and the last line of stderr names the problem."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import MESHLM
from waiting import free_port

pytestmark = pytest.mark.mesh
FAILED, USAGE = 1, 2
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def serve(*words: str, **environment: str) -> tuple[int, list[str]]:
    """Exit code and lines of stderr of a start that is bound to fail. TimeoutExpired when it does not end."""
    with tempfile.TemporaryDirectory(prefix="mlm") as folder:
        given = {word for word in words if word.startswith("--")}
        defaults = {"--host": "127.0.0.1", "--port": str(free_port()), "--run-dir": folder}
        if "--config" not in given:
            words += tuple(part for flag, value in defaults.items() if flag not in given for part in (flag, value))
        done = subprocess.run(
            [MESHLM, "serve", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONSAFEPATH": "1", **environment},
        )
        return done.returncode, done.stderr.splitlines()


def refused(wanted_code: int, *words: str, **environment: str) -> str:
    """The last line; the code is as wanted, and nobody gets a traceback."""
    code, lines = serve(*words, **environment)
    shown = "\n".join(lines)
    assert code == wanted_code, shown
    assert "Traceback" not in shown
    return lines[-1]


def refused_each(*cases: tuple[str, list[str]]) -> None:
    """Wrong usages, each a start of its own: the last line has the word."""

    def check(case: tuple[str, list[str]]) -> str:
        word, words = case
        line = refused(USAGE, *words)
        return "" if word in line else f"{word!r} is not in the answer to {words}: {line}"

    with ThreadPoolExecutor(2) as pool:
        assert not "\n".join(filter(None, pool.map(check, cases)))


# --- models ---


def config(**changes: Any) -> bytes:
    return json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE, **changes}).encode()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama as transformers writes it, with the tokenizer of its training that never was."""
    import tokenizers
    import torch
    import transformers

    path = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(path)
    words = {chr(number + 33): number for number in range(90)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="!")).save(str(path / "tokenizer.json"))
    return path


def altered(llama: Path, folder: str, name: str, content: bytes | None) -> Path:
    """A copy of the Llama in which one file is other, or gone."""
    path = llama.parent / folder
    shutil.copytree(llama, path)
    (path / name).unlink()
    if content is not None:
        (path / name).write_bytes(content)
    return path


@pytest.fixture(scope="module")
def starts(llama: Path) -> Iterator[dict[str, Future[str]]]:
    """Starts that fail late, for the tests below: most of their seconds are torch's import, so two run at a time."""
    weights = (llama / "model.safetensors").read_bytes()
    cut = altered(llama, "cut", "model.safetensors", weights[: len(weights) // 2])
    other = altered(llama, "other", "config.json", config(num_hidden_layers=3))
    no_tokenizer = altered(llama, "no-tokenizer", "tokenizer.json", None)
    bad_tokenizer = altered(llama, "bad-tokenizer", "tokenizer.json", b"{")
    memory = (str(llama), "--device", "cpu", "--kv-cache-memory", "64K", "--max-model-len", "256")
    with ThreadPoolExecutor(2) as pool:
        yield {
            "cut weights": pool.submit(refused, USAGE, str(cut), "--device", "cpu"),
            "other weights": pool.submit(refused, FAILED, str(other), "--device", "cpu"),
            "no tokenizer": pool.submit(refused, USAGE, str(no_tokenizer), "--device", "fake"),
            "bad tokenizer": pool.submit(refused, FAILED, str(bad_tokenizer), "--device", "fake"),
            "little memory": pool.submit(refused, FAILED, *memory),
            "no GPU": pool.submit(refused, FAILED, str(llama), "--device", "cuda"),
        }


def test_no_config(llama: Path) -> None:
    path = altered(llama, "no-config", "config.json", None)
    assert f"{path}: no config.json there" in refused(USAGE, str(path))


BAD_CONFIGS = [
    (b"{", "config.json"),
    (b"\xff\xfe\x00", "config.json"),
    (b"{}", "architecture"),
    (config(hidden_size="many"), "config.json"),
    (b'{"architectures": ["LlamaForCausalLM"]}', "num_attention_heads"),
]


def test_a_broken_config(tmp_path: Path) -> None:
    cases = []
    for number, (content, word) in enumerate(BAD_CONFIGS):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_bytes(content)
        (folder / "model.safetensors").touch()
        cases.append((word, [str(folder)]))
    refused_each(*cases)


def test_an_unsupported_architecture(llama: Path) -> None:
    path = altered(llama, "unsupported", "config.json", config(architectures=["Llama9ForCausalLM"]))
    line = refused(USAGE, str(path))
    assert "architecture Llama9ForCausalLM is not supported; near it: LlamaForCausalLM" in line


def test_no_weights(llama: Path) -> None:
    assert "no weights" in refused(USAGE, str(altered(llama, "no-weights", "model.safetensors", None)))


def test_truncated_safetensors(starts: dict[str, Future[str]]) -> None:
    assert "cut/model.safetensors" in starts["cut weights"].result()


def test_safetensors_of_another_model(starts: dict[str, Future[str]]) -> None:
    assert "layers.2." in starts["other weights"].result()


@pytest.mark.parametrize("which", ["no tokenizer", "bad tokenizer"])
def test_a_broken_tokenizer(starts: dict[str, Future[str]], which: str) -> None:
    assert "tokenizer.json" in starts[which].result()


def test_a_broken_gguf(tmp_path: Path) -> None:
    cases = []
    for number, content in enumerate((b"", b"GGUF\x03\0\0\0" + b"\xff" * 16, b"x" * 1000)):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(content)
        cases.append((str(file), [str(file)]))
    refused_each(*cases)


def test_no_such_model() -> None:
    models = ("/no/such/folder", "./model", "model.gguf")
    refused_each(*((f"MODEL {model}: no such file or folder", [model]) for model in models))


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    line = refused(USAGE, "someone/a-model", HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
    assert "someone/a-model" in line
    assert "hub" in line


def test_no_hub_name(tmp_path: Path) -> None:
    assert "no model!" in refused(USAGE, "no model!", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")


# --- the machine ---


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port: int = taken.getsockname()[1]
        line = refused(FAILED, "--device", "fake", "--port", str(port))
        assert f"--port {port}" in line
        assert "in use" in line


def test_too_little_memory_for_one_request(starts: dict[str, Future[str]]) -> None:
    """64 KiB hold 128 tokens: 2 layers of 2 heads of 16 floats, keys and values."""
    line = starts["little memory"].result()
    assert "--max-model-len 256" in line
    assert "--max-model-len 128 would fit" in line


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_cuda_without_a_gpu(starts: dict[str, Future[str]]) -> None:
    assert "--device cuda" in starts["no GPU"].result()


def test_a_run_directory_of_somebody_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    line = refused(FAILED, "--device", "fake", "--run-dir", str(tmp_path))
    assert str(tmp_path) in line
    assert "0700" in line


# --- flags ---


WRONG_FLAGS = [
    (["--max-model-length", "5"], "--max-model-length"),
    (["--device", "tpu"], "--device"),
    (["--kv-cache-memory", "much"], "--kv-cache-memory"),
    (["--max-num-seqs", "0"], "--max-num-seqs"),
    (["--max-model-len", "1000000"], "--max-model-len"),
    (["--max-num-batched-tokens", "1"], "--max-num-batched-tokens"),
    (["--block-size", "17"], "--block-size"),
    (["--chat-template", "/no/template"], "--chat-template"),
    (["--port"], "--port"),
    (["--device", "cpu", "-tp", "2"], "--tensor-parallel-size 2: does not divide the model's 9 attention heads"),
    (["--device", "cpu", "-pp", "4"], "--pipeline-parallel-size 4: does not divide the model's 30 layers"),
    (
        ["--device", "cuda", "-tp", "3", "-dp", "99"],
        "--tensor-parallel-size 3 x --data-parallel-size 99 needs 297 GPUs",
    ),
    (["one", "two"], "two"),
    (["--config", "/no/file.toml"], "/no/file.toml"),
]
WRONG_FILES = [
    (b"max-model-lenn = 5", "max-model-lenn"),
    (b"[scheduler]\nmax_seqs = 5", "max_seqs"),
    (b"[server]\nport = 70000", "--port"),
    (b"kv-cache-memory = 'much'", "kv_cache_memory"),
    (b"port = ", ".toml"),
    (b"\xff\xfe", ".toml"),
]


def test_wrong_flags() -> None:
    refused_each(*((named, words) for words, named in WRONG_FLAGS))


def test_a_wrong_config_file(tmp_path: Path) -> None:
    cases = []
    for number, (content, named) in enumerate(WRONG_FILES):
        file = tmp_path / f"{number}.toml"
        file.write_bytes(content)
        cases.append((named, ["--config", str(file)]))
    refused_each(*cases)
