"""What is in deploy/, for the tests of this folder."""

import re
from pathlib import Path
from typing import Any

import pytest

from meshlm.protocol.config import RunConfig, ServerConfig
from meshlm.supervisor.io import KILL_AFTER_S

yaml: Any = pytest.importorskip("yaml", reason="PyYAML comes with transformers")

DEPLOY = Path(__file__).parents[3] / "deploy"
PORT = ServerConfig().port
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
YAML_FILES = [path for path in FILES if path.suffix == ".yaml"]
KUBERNETES = DEPLOY / "kubernetes"
# Flags that stand in these files and are other programs': of Docker and what runs in its build, kubectl, Slurm.
OTHERS = {
    *("--gpus", "--build", "--wait", "--interval", "--timeout", "--start-period", "--retries", "--from"),
    *("--no-install-recommends", "--no-deps", "--uid", "--user-group", "--create-home", "--shell"),
    *("--from-literal", "--from-file", "--replicas", "--now"),
    *(
        "--base",
        "--suite",
        "--mirror",
        "--ca",
        "--secret",
        "--mount",
        "--site",
        "--check",
        "--variant",
        "--format",
        "--isolation",
        "--build-arg",
        "--type",
    ),
    *(
        "--job-name",
        "--nodes",
        "--ntasks",
        "--ntasks-per-node",
        "--cpus-per-task",
        "--gpus-per-node",
        "--mem",
        "--time",
    ),
    *("--output", "--signal", "--batch", "--relative", "--kill-on-bad-exit"),
}


def used_flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))


def value_of(words: list[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


def needed_s(words: list[str]) -> float:
    """How long a stop may take with these arguments."""
    assert not any(word.startswith("--drain-timeout=") for word in words)
    return float(value_of(words, "--drain-timeout") or RunConfig().drain_timeout) + KILL_AFTER_S


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)(s|m)?", text)
    assert match, text
    return int(match[1]) * (60 if match[2] == "m" else 1)


def kubernetes(name: str) -> Any:
    return yaml.safe_load((KUBERNETES / f"{name}.yaml").read_text())


def dockerfile_lines() -> list[str]:
    return (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
