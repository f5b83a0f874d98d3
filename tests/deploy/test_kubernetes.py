"""The manifests agree with the flags, with each other, and with the API."""

import argparse
import importlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from files import KUBERNETES, PORT, YAML_FILES, dockerfile_lines, kubernetes, needed_s, value_of, yaml

from meshlm.protocol.config import RunConfig
from meshlm.supervisor.io import KILL_AFTER_S
from meshlm.supervisor.settings import flags


def validate(resource: Any) -> None:
    """Against the API's schemas. The package takes a second to import, and other processes of pytest read this file, too."""
    kubernetes_validate: Any = importlib.import_module("kubernetes_validate")  # typed in no version
    kubernetes_validate.validate(resource, "1.34", strict=True)


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


NOT_RESOURCES = {"kustomization.yaml", "names.yaml", "values.env"}


@pytest.mark.parametrize("folder", [".", "nodes"])
def test_kustomization_names_all_files(folder: str) -> None:
    named = set(kubernetes(f"{folder}/kustomization")["resources"])
    assert named == {path.name for path in (KUBERNETES / folder).iterdir() if path.is_file()} - NOT_RESOURCES


@pytest.mark.parametrize(
    "path", [path for path in YAML_FILES if KUBERNETES in path.parents and path.name not in NOT_RESOURCES], ids=str
)
def test_the_api_s_schema(path: Path) -> None:
    """LeaderWorkerSet is no type of the API's own: what is in it are pods."""
    resource = yaml.safe_load(path.read_text())
    if resource["kind"] != "LeaderWorkerSet":
        validate(resource)
        return
    assert resource["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    for template in ("leaderTemplate", "workerTemplate"):
        pod = resource["spec"]["leaderWorkerTemplate"][template]
        assert set(pod) == {"metadata", "spec"}
        found = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **pod["metadata"]}, "spec": pod["spec"]}
        validate(found)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("folder", [".", "nodes"])
def test_kustomize_puts_the_values_in(folder: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / folder)], capture_output=True, text=True, timeout=300, check=True
    )
    resources = {found["kind"]: found for found in yaml.safe_load_all(done.stdout)}
    name = resources["ConfigMap"]["metadata"]["name"]
    assert name != "meshlm", "its name has a hash, so that a changed value restarts the pods"
    assert f"name: {name}" in done.stdout.split("\n---\n", 1)[1]
    assert "image: meshlm\n" not in done.stdout, "every image is replaced"


# --- a mesh over several pods ---


@pytest.fixture
def group() -> Any:
    return kubernetes("nodes/leaderworkerset")["spec"]["leaderWorkerTemplate"]


def pods(group: Any) -> tuple[Any, Any]:
    return group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]


def as_started(words: list[str], index: int) -> list[str]:
    """With the values that the cluster puts in."""
    lines = (KUBERNETES / "nodes/values.env").read_text().splitlines()
    values = dict(line.split("=") for line in lines if not line.startswith("#"))
    values |= {
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": str(index),
        "POD_IP": "10.1.1.1",
        "LWS_LEADER_ADDRESS": "m-0.m",
    }
    return [re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], word) for word in words]


def test_head_and_node_fit_together(group: Any) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    flags.add_flags(parser)
    head, node = (
        flags.build(vars(parser.parse_args(as_started(pod["containers"][0]["args"], index))), None)
        for index, pod in enumerate(pods(group))
    )
    assert head.network.listen.rpartition(":")[2] == node.network.join.rpartition(":")[2]
    assert (head.network.headless, node.network.headless) == (False, True)
    assert (head.parallel.node_rank, node.parallel.node_rank) == (0, 1)
    shared = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "nnodes")
    assert [getattr(head.parallel, name) for name in shared] == [getattr(node.parallel, name) for name in shared]
    assert head.parallel.data_parallel_size * head.parallel.workers_per_rank == head.parallel.nnodes
    assert head.network.key_file == node.network.key_file
    assert head.server.port == PORT


def test_pods_of_a_group(group: Any) -> None:
    for pod in pods(group):
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() | {"secret"} == {volume["name"] for volume in pod["volumes"]}
        assert f"--key-file={mounts['key']}/mesh.key" in container["args"]
        (copy,) = pod["initContainers"]
        assert copy["command"][:3] == ["install", "-m", "0600"]
        assert copy["command"][-1] == f"{mounts['key']}/mesh.key"
    head, _ = pods(group)
    (container,) = head["containers"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness", "startup")}
    assert paths == {"liveness": "/health", "readiness": "/ready", "startup": "/ready"}
    _, before = container["lifecycle"]["preStop"]["exec"]["command"]
    assert head["terminationGracePeriodSeconds"] > int(before) + RunConfig().drain_timeout + KILL_AFTER_S


def test_http_goes_to_the_head_alone(group: Any) -> None:
    selector = kubernetes("nodes/service")["spec"]["selector"]
    labels = [group[template]["metadata"]["labels"] for template in ("leaderTemplate", "workerTemplate")]
    assert [selector.items() <= one.items() for one in labels] == [True, False]
    for name in ("poddisruptionbudget", "networkpolicy"):
        spec = kubernetes(f"nodes/{name}")["spec"]
        both = (spec.get("selector") or spec["podSelector"])["matchLabels"]
        assert all(both.items() <= one.items() for one in labels)
