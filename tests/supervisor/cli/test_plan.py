"""`meshlm serve --dry-run` starts nothing and says what would be; completion scripts are what shells take."""

import json
import socket
from pathlib import Path

import pytest
from waiting import free_port

from meshlm.supervisor.cli import main, plan

FAKE = ("serve", "--dry-run", "--device", "cpu", "--kv-cache-memory", "1G")


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*FAKE, "-dp", "2", "--port", str(free_port()), "--run-dir", str(tmp_path / "run"), "--api-key", "secret-9"]
    assert main.run(words) == 0
    said = capsys.readouterr().out
    for text in (
        "worker/0, worker/1",
        "scheduler/1",
        "LlamaForCausalLM",
        "1.00 GiB (--kv-cache-memory)",
        "0.0.0.0:",
        "***",
    ):
        assert text in said, said
    assert "secret-9" not in said
    assert not (tmp_path / "run").exists()


def test_a_store_is_named_with_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kv-offloading-size", "0.5", "--kv-offloading-path", str(tmp_path / "kv"), "--port", str(free_port())]
    assert main.run([*FAKE, *words]) == 0
    said = capsys.readouterr().out
    assert f"memory of the store: 0.5 GiB of this host's, and behind it {tmp_path / 'kv'}" in said
    assert "store/0" in said
    assert not (tmp_path / "kv").exists()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main.run(
            ["serve", "--dry-run=json", "--device", "fake", "--port", str(free_port()), "--admin-api-key", "secret-9"]
        )
        == 0
    )
    said = capsys.readouterr().out
    found = json.loads(said)
    assert found["config"]["resolved"]["device"] == "fake"
    assert found["processes"]["worker"] == ["worker/0"]
    assert "secret-9" not in said


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--model", "/nowhere"), 2, "/nowhere"),
        (("--numa-bind-nodes", "0"), 2, "--numa-bind"),
        (("--log-level", "loud"), 2, "--log-level loud"),
    ],
)
def test_what_a_start_refuses_it_refuses(
    words: tuple[str, ...], code: int, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*FAKE, "--port", str(free_port()), *words]) == code
    assert says in capfd.readouterr().err


def test_a_port_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main.run([*FAKE, "--port", str(taken.getsockname()[1])]) == 1
    assert "in use" in capfd.readouterr().err


def test_weights_count_once(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 10)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 5)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 99)
    assert plan.weight_bytes(tmp_path) == 15
    assert plan.weight_bytes(tmp_path / "a.safetensors") == 10
    assert plan.weight_bytes(tmp_path / "none") == 0
