"""What the doctor says of good and of broken machines, and that its checks end."""

import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshlm.protocol.config import MeshConfig, ModelConfig, NetworkConfig, RunConfig, ServerConfig
from meshlm.supervisor.cli import main
from meshlm.supervisor.doctor import gpus, host, settings
from meshlm.supervisor.doctor.findings import Finding, State, exit_code, failed, ok, warning

GPU = {"name": "NVIDIA H200", "capability": [9, 0], "memory": 140 << 30}


def asked(count: int, **changes: Any) -> dict[str, Any]:
    """What torch says on a host with so many good GPUs."""
    peers = [[True] * count for _ in range(count)]
    return {
        "cuda": "13.0",
        "nccl": [2, 28, 3],
        "gpus": [GPU] * count,
        "free": [139 << 30] * count,
        "peers": peers,
        **changes,
    }


@pytest.mark.parametrize(
    ("finding", "state", "advice"),
    [
        (host.python((3, 12)), State.OK, ""),
        (host.python((3, 14)), State.WARNING, "3.11 to 3.13"),
        (host.shared_memory(Path("/nowhere")), State.FAILED, "mount a tmpfs"),
        (host.open_files(1024), State.WARNING, "LimitNOFILE"),
        (host.open_files(resource.RLIM_INFINITY), State.OK, ""),
        (host.locked_memory(8 << 20), State.OK, "LimitMEMLOCK"),
        (host.memory(64 << 30, 2 << 30), State.WARNING, "1 GiB"),
        (host.memory(64 << 30, 60 << 30), State.OK, ""),
        (host.clock(5), State.WARNING, "chrony"),
        (host.clock(0), State.OK, ""),
        (host.clock(None), State.WARNING, "NTP"),
        (host.compiler("", Path("/nowhere")), State.FAILED, "install gcc"),
        (host.compiler("/usr/bin/cc", Path("/nowhere")), State.WARNING, "python3-dev"),
        (gpus.package("torch", "2.11.0+cu130"), State.OK, ""),
        (gpus.package("torch", "2.10.1"), State.WARNING, "2.11"),
        (gpus.package("torch", ""), State.FAILED, "pip install"),
        (gpus.package("triton", ""), State.WARNING, "GPUs need it"),
        (gpus.driver(None, None), State.SKIPPED, ""),
        (gpus.driver("570.1", "13.0"), State.FAILED, "580"),
        (gpus.driver("570.1", "12.8"), State.OK, ""),
        (gpus.driver("580.1", None), State.FAILED, "with CUDA"),
        (settings.port(MeshConfig(server=ServerConfig(host="203.0.113.7"))), State.FAILED, "--port"),
        (settings.run_directory(MeshConfig(run=RunConfig(run_dir="/tmp"))), State.FAILED, "mode 0700"),
        (settings.api_keys(MeshConfig()), State.OK, ""),
        (settings.api_keys(MeshConfig(server=ServerConfig(host="0.0.0.0"))), State.WARNING, "MESHLM_API_KEY"),
        (settings.api_keys(MeshConfig(server=ServerConfig(api_key_file="/nowhere"))), State.FAILED, "security.md"),
        (settings.mesh_keys("/nowhere"), State.FAILED, "meshlm keys"),
        (settings.model(MeshConfig(model=ModelConfig(model="/nowhere"))), State.FAILED, "models.md"),
        (settings.model(MeshConfig(model=ModelConfig(model="Qwen/Qwen3-0.6B"))), State.OK, ""),
    ],
)
def test_what_it_says(finding: Finding, state: State, advice: str) -> None:
    assert finding.state is state, finding
    assert advice in finding.advice
    assert bool(finding.advice) or state in (State.OK, State.SKIPPED)
    assert finding.found


@pytest.mark.parametrize(
    ("said", "has_driver", "states"),
    [
        (asked(0), False, {"gpu": State.SKIPPED}),
        (asked(0), True, {"gpu": State.FAILED}),
        ({"problem": "CUDA error 803"}, True, {"gpu": State.FAILED}),
        (asked(1), True, {"gpu 0": State.OK, "nccl": State.OK}),
        (asked(1, free=[1 << 30]), True, {"gpu 0": State.WARNING, "nccl": State.OK}),
        (asked(2), True, {"gpu 0": State.OK, "gpu 1": State.OK, "nccl": State.OK, "peer access": State.OK}),
        (
            asked(2, peers=[[True, False], [False, True]]),
            True,
            {"gpu 0": State.OK, "gpu 1": State.OK, "nccl": State.OK, "peer access": State.WARNING},
        ),
    ],
)
def test_gpus(said: dict[str, Any], has_driver: bool, states: dict[str, State]) -> None:
    assert {one.name: one.state for one in gpus.gpus(said, has_driver)} == states


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = settings.port(MeshConfig(server=ServerConfig(port=taken.getsockname()[1])))
    assert found.state is State.FAILED
    assert "in use" in found.found


def test_keys_that_others_can_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("secret\n")
    path.chmod(0o644)
    found = settings.api_keys(MeshConfig(server=ServerConfig(api_key_file=str(path))))
    assert found.state is State.WARNING
    assert "secret" not in found.found + found.advice
    path.write_text("{}")
    assert settings.mesh_keys(str(path)).state is State.FAILED
    assert NetworkConfig().key_file == ""


PROBE = """
import psutil
sockets = psutil.Process().net_connections("inet")
wide = [one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr.ip not in ("127.0.0.1", "::1")]
if wide:
    sys.exit(f"it listens on {wide}")
"""


def test_the_check_listens_for_this_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    program = gpus._PROGRAM.replace("numbers = torch.full", f"{PROBE}numbers = torch.full")
    assert PROBE in program
    monkeypatch.setattr(gpus, "_PROGRAM", program)
    found = gpus.communication(0)
    assert found.state is State.OK, found
    assert gpus.environment({"GLOO_SOCKET_IFNAME": "eth7"})["GLOO_SOCKET_IFNAME"] == "eth7"


def test_processes_sum() -> None:
    found = gpus.communication(0)
    assert found.state is State.OK, found
    assert "2 processes" in found.found


@pytest.mark.parametrize(
    ("program", "says"), [("import time; time.sleep(600)", "hangs"), ("raise SystemExit('no way')", "no way")]
)
def test_a_check_that_hangs_or_fails_ends(program: str, says: str) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert says in gpus._wait(processes, 0.0 if says == "hangs" else time.monotonic() + 60)
    assert all(process.returncode is not None for process in processes)


def test_a_torch_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_PROBE", "import time; time.sleep(600)")
    monkeypatch.setattr(gpus, "ASK_S", 0.2)
    assert "did not answer" in gpus._ask_torch()["problem"]


def test_the_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpus, "_ask_torch", lambda: asked(0))
    monkeypatch.setattr(os, "environ", {**os.environ, "MESHLM_API_KEY": "secret-7"})
    words = ["doctor", "--no-communication", "--host", "127.0.0.1"]
    assert main.run([*words, "--json", "--model", "/nowhere"]) == 1
    said = capfd.readouterr().out
    found = {one["name"]: one for one in json.loads(said)}
    assert found["model"]["state"] == "failed"
    assert "secret-7" not in said
    main.run(words)
    assert "0 failed" in capfd.readouterr().out


def test_warnings_are_no_failures() -> None:
    assert exit_code([ok("a", "b"), warning("c", "d", "e")]) == 0
    assert exit_code([ok("a", "b"), failed("c", "d", "e")]) == 1
