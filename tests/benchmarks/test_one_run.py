"""benchmarks/one_run.py: jobs that exist, and what is not begun."""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def one_run(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("one_run")


def given(tmp_path: Path, **values: object) -> Namespace:
    return Namespace(**{"out": tmp_path, "vllm": "", "sharegpt": "", "gpus": ["0"], **values})


def test_all_jobs_are_of_models_and_programs_that_there_are(
    one_run: ModuleType, benchmark_module: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    shapes = benchmark_module("shapes")
    assert len({job.name for job in one_run.JOBS}) == len(one_run.JOBS)
    for job in one_run.JOBS:
        command = one_run.command_of(job, given(tmp_path, vllm="site", gpus=["0", "1"]), tmp_path / "models")
        assert "{" not in "".join(command), job.name
        assert command[2] == "-m" or Path(command[2]).exists(), job.name
        for word in command:
            if word.startswith(str(tmp_path / "models")):
                shapes.config_of(Path(word.partition("@")[0]).name)
        assert command[-2:] == ["0", "1"] or not job.beside


def test_what_is_not_begun(one_run: ModuleType, tmp_path: Path) -> None:
    job, beside = one_run.Job("a", ("x.py",), 60), one_run.beside("b", "llama3-8b")
    assert one_run.why_not(job, given(tmp_path), 61.0) == ""
    assert "60 s, and 59 are left" in one_run.why_not(job, given(tmp_path), 59.0)
    assert "2 GPUs" in one_run.why_not(job._replace(gpus=2), given(tmp_path), 1e6)
    assert one_run.why_not(beside, given(tmp_path, vllm="site"), 1e6) == "", "one after the other"
    assert "--vllm" in one_run.why_not(beside, given(tmp_path, gpus=["0", "1"]), 1e6)
    (tmp_path / "a.json").write_text("{}")
    assert "there" in one_run.why_not(job, given(tmp_path), 1e6)


def test_a_job_that_fails_or_takes_too_long_is_said(one_run: ModuleType, tmp_path: Path) -> None:
    log, job = tmp_path / "log", one_run.Job("a", (), 1)
    assert one_run.do(job._replace(limit_s=60), [sys.executable, "-c", "print('hello')"], log) == ""
    assert "exit code 3" in one_run.do(job._replace(limit_s=60), [sys.executable, "-c", "raise SystemExit(3)"], log)
    assert "longer than 1 s" in one_run.do(
        job, [sys.executable, "-c", "import threading; threading.Event().wait()"], log
    )
    assert log.read_text() == "hello\n"


def test_it_writes_the_models_and_goes_on_behind_what_is_there(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    (tmp_path / "kernels_llama3_8b_fp8.json").write_text("{}")
    command = [
        sys.executable,
        "-P",
        str(BENCHMARKS / "one_run.py"),
        "--out",
        str(tmp_path),
        "--tokenizer",
        str(tokenizer),
    ]
    command += ["--minutes", "0", "--only", "kernels_llama3_8b_fp8", "kernels_llama3_8b_awq", "dense_steps"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        "kernels_llama3_8b_fp8",
        "kernels_llama3_8b_awq",
        "dense_steps",
    ]
    assert "its figures are there" in said[0]
    assert "0 are left" in said[1]
    assert "0 are left" in said[2]
    assert {path.name for path in (tmp_path / "models").iterdir()} >= {
        "llama3-8b",
        "llama3-8b+awq",
        "qwen3-0.6b",
        "phi4",
    }
