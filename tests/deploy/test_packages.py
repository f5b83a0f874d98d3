"""The wheel and the sdist: whole, the same each time, and working far from the tree."""

import hashlib
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import httpx
import pytest
from waiting import free_port

ROOT = Path(__file__).parents[2]


def built(dist: Path) -> dict[str, str]:
    """Names and hashes."""
    command = [sys.executable, "-P", str(ROOT / "deploy/packages.py"), str(dist)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(dist.iterdir())}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    built(folder)
    return folder


def the(dist: Path, pattern: str) -> Path:
    (found,) = dist.glob(pattern)
    return found


def test_the_same_sources_give_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        again = built(tmp_path / "again")
    finally:
        os.umask(before)
    assert again == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(dist.iterdir())}
    assert len(again) == 2


def test_every_file_of_the_product_is_in_both(dist: Path) -> None:
    folders = [path for path in (ROOT / "src/meshlm").iterdir() if path.is_symlink()]
    wanted = {
        f"meshlm/{folder.name}/{path.relative_to(folder.resolve())}"
        for folder in folders
        for path in folder.resolve().rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } | {"meshlm/py.typed", "meshlm/__init__.py"}
    in_wheel = set(zipfile.ZipFile(the(dist, "*.whl")).namelist())
    assert sorted(wanted - in_wheel) == []
    assert any(name.endswith("licenses/LICENSE") for name in in_wheel)
    with tarfile.open(the(dist, "*.tar.gz")) as archive:
        in_sdist = {name.partition("/src/")[2] for name in archive.getnames()}
    assert sorted(wanted - in_sdist) == []


def test_the_image_is_given_all_that_the_package_is_made_of() -> None:
    """Dockerfile copies the tree but for these."""
    ignored = (ROOT / "deploy/Dockerfile.dockerignore").read_text().split()
    linked = {path.readlink().name for path in (ROOT / "src/meshlm").iterdir() if path.is_symlink()}
    assert not {*linked, "src", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"} & set(ignored)


@pytest.mark.mesh
def test_the_wheel_serves_from_a_fresh_environment(dist: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment: they need not be fetched again. The product is the wheel's alone."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    python = home / "bin/python"
    site = next(home.glob("lib/python*/site-packages"))
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(here) + "\n")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--force-reinstall",
    ]
    subprocess.run([*install, str(the(dist, "*.whl"))], check=True, capture_output=True, timeout=300)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    where = [str(python), "-c", "import meshlm; print(meshlm.__file__)"]
    said = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert said.stdout.startswith(str(home)), said.stdout
    port = free_port()
    words = [
        "serve",
        "--device",
        "fake",
        "--port",
        str(port),
        "--run-dir",
        str(tmp_path / "run"),
        "--log-format",
        "json",
        "--orphan-grace",
        "0",
    ]
    command = [str(home / "bin/meshlm"), *words]
    with subprocess.Popen(command, cwd="/", env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "ready: http" in line:
                    break
            else:
                pytest.fail("".join(lines))
            body = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=300)
            assert answer.json()["usage"]["completion_tokens"] == 3
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


REPORT = {
    "dependencies": [
        {"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]},
        {"name": "b", "version": "1", "vulns": []},
        {"name": "c", "skip_reason": "not found"},
    ]
}


@pytest.mark.parametrize(
    ("said", "code", "text"),
    [
        (json.dumps(REPORT), 1, "a 1: CVE-1 (mended in: 2)"),
        ('{"dependencies": []}', 0, "0 known vulnerabilities"),
        ("ConnectionError", 0, "audit: skipped, since the database of vulnerabilities cannot be reached"),
        ('{"dependencies": [{"name": "c", "skip_reason": "not found"}]}', 0, "audit: skipped"),
    ],
)
def test_the_audit_reads_the_report(said: str, code: int, text: str, tmp_path: Path) -> None:
    (tmp_path / "report").write_text(said)
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/report\n")
    program.chmod(0o755)
    ask = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'deploy')!r}); sys.executable = {str(tmp_path / 'python')!r};"
        "import audit; sys.exit(audit.main())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", ask], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, text in done.stdout) == (code, True), done.stdout + done.stderr


def test_the_list_of_what_is_installed_names_the_product_and_its_dependencies(tmp_path: Path) -> None:
    """As `make sbom` makes it, which leaves out the check of the format by its maker."""
    pytest.importorskip("cyclonedx_py")
    (rule,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if "cyclonedx_py" in line)
    rule = rule.strip(" \t@").replace("$(BIN)/python", sys.executable)
    command = shlex.split(rule.replace("dist/sbom.cdx.json", str(tmp_path / "sbom.json")))
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True)
    sbom = json.loads((tmp_path / "sbom.json").read_text())
    assert (sbom["bomFormat"], sbom["metadata"]["component"]["name"]) == ("CycloneDX", "meshlm")
    there = {each["name"]: each["version"] for each in sbom["components"]}
    wanted = {"torch", "pyzmq", "msgspec", "starlette"}
    assert {name: importlib.metadata.version(name) for name in wanted}.items() <= there.items()
    assert all(each["purl"].startswith("pkg:pypi/") for each in sbom["components"] if each["name"] in wanted)
