"""The scripts of `meshlm completion`, tried by the shells that they are for."""

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from meshlm.supervisor.cli import machine, main

LIMIT_S = 30.0


@pytest.mark.parametrize("shell", machine.SHELLS)
def test_the_script_of_a_shell(shell: str, tmp_path: Path) -> None:
    script = machine.script(shell)
    assert "tensor-parallel-size" in script
    assert "doctor" in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=300)


def test_bash_completes_commands_and_flags(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(machine.script("bash"))
    ask = (
        f"source {tmp_path}/script; complete -p meshlm;"
        'f=$(complete -p meshlm | sed "s/.*-F \\([^ ]*\\).*/\\1/");'
        "COMP_WORDS=(meshlm serve --max-num-s); COMP_CWORD=2; $f meshlm --max-num-s serve; echo ${COMPREPLY[@]};"
        "COMP_WORDS=(meshlm doc); COMP_CWORD=1; COMPREPLY=(); $f meshlm doc meshlm; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-2:] == ["--max-num-seqs", "doctor"], done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_flags_and_values(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(machine.script("fish"))
    asks = ("meshlm doc", "meshlm serve --max-num-s", "meshlm serve --scheduling-policy p")
    ask = "; ".join([f"source {tmp_path}/script", *(f"complete -C '{words}'" for words in asks)])
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    command = ["fish", "--no-config", "-c", ask]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    found = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert found == ["doctor", "--max-num-seqs", "priority"], done.stdout + done.stderr


class Zsh:
    """An interactive zsh at a terminal of its own: completion is there for nobody else."""

    def __init__(self, folder: Path) -> None:
        (folder / "_meshlm").write_text(machine.script("zsh"))
        pid, self._terminal = pty.fork()
        if pid == 0:
            # its home has no settings, and its prompt no escapes
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": str(folder),
                "TERM": "dumb",
                "PS1": "ready> ",
                "PROMPT_EOL_MARK": "",
            }
            os.execvpe("zsh", ["zsh", "-f", "-i"], environment)
        self._pid, self._said = pid, ""
        self.until("ready> ")
        self.type(f"fpath=({folder} $fpath); autoload -Uz compinit; compinit -u -D; PS1='load''ed> '\n")
        self.until("loaded> ")  # which the line that was typed does not have

    def type(self, text: str) -> None:
        self._said = ""
        os.write(self._terminal, text.encode())

    def until(self, text: str) -> None:
        end = time.monotonic() + LIMIT_S
        while text not in self._said.replace("\r", ""):
            assert select.select([self._terminal], [], [], max(0.0, end - time.monotonic()))[0], self._said
            self._said += os.read(self._terminal, 4096).decode(errors="replace")

    def close(self) -> None:
        os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)
        os.close(self._terminal)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_commands_flags_and_values(tmp_path: Path) -> None:
    zsh = Zsh(tmp_path)
    try:
        for typed, becomes in (
            ("meshlm doc", "meshlm doctor"),
            ("meshlm serve --max-num-s", "--max-num-seqs"),
            ("meshlm serve --scheduling-policy p", "--scheduling-policy priority"),
        ):
            zsh.type(f"{typed}\t")
            zsh.until(becomes)
            zsh.type("\x15")  # ^U: begin anew
    finally:
        zsh.close()


def test_an_odd_shell_gets_one_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main.run(["completion", "elvish"]) == 2
    assert "bash, zsh, fish" in capfd.readouterr().err
    monkeypatch.setenv("SHELL", "/usr/bin/nu")
    assert main.run(["completion"]) == 2
    assert "nu" in capfd.readouterr().err
