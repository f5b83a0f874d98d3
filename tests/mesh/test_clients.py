"""Other people's clients against a mesh that serves SmolLM2, each in a process of its own: tests/clients/README.md."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Serving, serving

pytestmark = [pytest.mark.mesh, pytest.mark.model]

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.name for path in (ROOT / "tests" / "clients").glob("with_*.py"))
# Made by the Makefile.
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
WITH_ITS_OWN = {"with_aiperf.py": ROOT / ".venv-aiperf" / "bin" / "python"}
LIMIT_S = 300


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    info = ("--enable-tokenizer-info-endpoint", "--api", "ollama")  # the first by which lm-eval has the tokenizer
    with serving(
        "--device", "cpu", "--cpu-threads", "1", "--cpu-exact", "--kv-cache-memory", "1G", *tools, *info
    ) as found:
        yield found


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_client_needs_only_the_address(server: Serving, minilm: Path, program: str) -> None:
    python, path = WITH_ITS_OWN.get(program, PYTHON), ROOT / "tests" / "clients" / program
    command = [str(python), str(path), f"{server.url}/v1", "SmolLM2-135M-Instruct"]
    given = os.environ | {"TOKENIZER": str(minilm)}
    ended = subprocess.run(command, capture_output=True, text=True, cwd="/", env=given, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
