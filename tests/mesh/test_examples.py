"""examples/ and the pages of docs/api/ do what they say."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import Serving, serving

pytestmark = pytest.mark.mesh
EXAMPLES = Path(__file__).parents[2] / "examples"
PAGES = [
    page
    for page in sorted((EXAMPLES.parent / "docs" / "api").glob("*.md"))
    # test_vectors.py and test_grpc.py run two, another test below the third; the first needs a speech-to-text model;
    # clients/with_ollama.py does as the last says.
    if page.name not in ("audio.md", "embeddings.md", "grpc.md", "python.md", "ollama.md")
]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(
        "--device",
        "fake",
        "--fake-step-ms",
        "10",
        "--max-model-len",
        "4096",
        "--enable-prompt-embeds",
        "--server-dev-mode",
        "--enable-sleep-mode",
    ) as found:
        yield found


def example(name: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", str(EXAMPLES / name), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/")


def said(process: "subprocess.Popen[str]") -> str:
    """All that is left of its output, once it has ended well."""
    with process:
        assert process.stdout is not None
        out = process.stdout.read()
    assert process.returncode == 0
    return out


def test_stream(server: Serving) -> None:
    out = said(example("stream.py", "Why is the sky blue?", "--url", server.url, "--max-tokens", "20"))
    assert "20 tokens; the first after" in out


def test_unbreakable_outlives_its_frontend(server: Serving) -> None:
    asked = {"prompt": "Once upon a time", "max_tokens": 150, "ignore_eos": True}
    expected = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=300).json()["choices"][0]["text"]
    process = example("unbreakable.py", "Once upon a time", "--url", server.url, "--max-tokens", "150")
    assert process.stdout is not None
    begun = process.stdout.read(40)
    os.kill(server.pid("frontend"), signal.SIGKILL)
    assert begun + said(process) == expected + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_pages_programs_run(server: Serving, page: Path) -> None:
    """Its blocks of Python, one behind the other, as a reader would type them."""
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S))
    assert "http://localhost:8000" in program
    program = program.replace("http://localhost:8000", server.url)
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd="/", timeout=300)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout


def test_the_page_of_python() -> None:
    """Its programs, with the fake device in the place of a model."""
    page = (EXAMPLES.parent / "docs" / "api" / "python.md").read_text("utf-8")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S))
    assert program.count('"HuggingFaceTB/SmolLM2-135M-Instruct"') == 2
    program = program.replace('"HuggingFaceTB/SmolLM2-135M-Instruct"', 'device="fake"')
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd="/", timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("abort\n")


def test_offline() -> None:
    lines = said(example("offline.py", "--device", "fake")).splitlines()
    assert [line.split(" -> ")[0] for line in lines][:2] == ["'The capital of France is'", "'Once upon a time'"]
    assert len(lines) == 4
