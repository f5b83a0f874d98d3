"""`meshlm serve --dry-run` starts nothing and says what would be; completion scripts are what shells take."""

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from waiting import free_port

from meshlm.supervisor.cli import completion, main, plan

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


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_script_of_a_shell(shell: str, tmp_path: Path) -> None:
    script = completion.script(shell)
    assert "tensor-parallel-size" in script
    assert "doctor" in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=30)


def test_bash_completes_commands_and_flags(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(completion.script("bash"))
    ask = (
        f"source {tmp_path}/script; complete -p meshlm;"
        'f=$(complete -p meshlm | sed "s/.*-F \\([^ ]*\\).*/\\1/");'
        "COMP_WORDS=(meshlm serve --max-num-s); COMP_CWORD=2; $f meshlm --max-num-s serve; echo ${COMPREPLY[@]};"
        "COMP_WORDS=(meshlm doc); COMP_CWORD=1; COMPREPLY=(); $f meshlm doc meshlm; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[-2:] == ["--max-num-seqs", "doctor"], done.stdout + done.stderr


def test_an_odd_shell_gets_one_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main.run(["completion", "elvish"]) == 2
    assert "bash, zsh, fish" in capfd.readouterr().err
    monkeypatch.setenv("SHELL", "/usr/bin/nu")
    assert main.run(["completion"]) == 2
    assert "nu" in capfd.readouterr().err
