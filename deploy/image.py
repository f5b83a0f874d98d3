"""Builds the image of deploy/Dockerfile with buildah, which needs no daemon, and looks at it as it runs: make image, as root.

    python -P deploy/image.py [--base IMAGE] [--suite SUITE --mirror URL --site FOLDER] [--ca FILE] [-- FLAGS of buildah build]

Without --base the base is a minimal system (debootstrap) of this machine's own suite and sources, for places that reach no registry;
CUDA is what torch's wheel brings.
--ca is for networks whose proxy has a certificate authority of its own: pip trusts it while the image is built, and the image does not
keep it.
Needs buildah, debootstrap without --base, and psutil. The image is kept as `meshlm`.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
import apt_sources

ROOT = Path(__file__).parents[1]
BASE, IMAGE = "localhost/meshlm-base", "meshlm"
START_S, STOP_S = 300.0, 60.0


def run(*words: str) -> str:
    """What the command prints; its errors are ours."""
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@contextmanager
def container(image: str) -> Iterator[str]:
    name = run("buildah", "from", image)
    try:
        yield name
    finally:
        run("buildah", "rm", name)


def make_base(suite: str, mirror: str, site: str) -> str:
    """site: a folder of files for it, such as the etc/pip.conf of an index of one's own."""
    with tempfile.TemporaryDirectory() as folder:
        run("debootstrap", "--variant=minbase", suite, folder, mirror)
        with container("scratch") as name:
            for files in filter(None, (folder, site)):
                run("buildah", "copy", "-q", name, files, "/")
            run("buildah", "commit", "-q", name, BASE)
    return BASE


def build(base: str, ca: str, more: list[str]) -> None:
    words = ["buildah", "build", "--format", "docker", "--isolation", "chroot", "-f", "deploy/Dockerfile", "-t", IMAGE]
    words += ["--secret", f"id=ca,src={Path(ca).resolve(strict=True)}"] if ca else []
    subprocess.run([*words, "--build-arg", f"CUDA_IMAGE={base}", *more, "."], check=True, cwd=ROOT)


def check() -> None:
    """The image serves as its user with its own entry point, says that it is healthy, and ends in order at SIGTERM."""
    config = json.loads(run("buildah", "inspect", "--type", "image", IMAGE))["Docker"]["config"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ExitStack() as until_done:
        name = until_done.enter_context(container(IMAGE))
        inside = ["buildah", "run", "--isolation", "chroot", name, "--"]
        who = run(*inside, "id")
        assert who.startswith("uid=10001(meshlm) gid=10001(meshlm)"), who
        run(*inside, "sh", "-c", 'touch /cache/probe && test "$XDG_CACHE_HOME" = /cache')
        flags = [
            "--device",
            "cpu",
            "--port",
            str(port),
            "--max-model-len",
            "256",
        ]  # its own model, with kernels that it compiles
        begun = time.monotonic()
        server = subprocess.Popen([*inside, *config["Entrypoint"], *flags])
        until_done.callback(server.kill)
        while not answers(port):
            assert server.poll() is None and time.monotonic() - begun < START_S, "it does not become ready"  # noqa: PT018
            time.sleep(0.1)
        print(f"image: ready after {time.monotonic() - begun:.1f} s, as {who}")
        healthy = [word.replace("8000", str(port)) for word in config["Healthcheck"]["Test"][1:]]
        run(*inside, *healthy)
        usage = ask(port, {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True})["usage"]
        assert usage["completion_tokens"] == 4, usage
        (first,) = (one for one in psutil.Process(server.pid).children(recursive=True) if one.name() == "tini")
        first.terminate()
        assert server.wait(STOP_S) == 0, "it ends with an error"
        print("image: healthy, computes, and ends in order at SIGTERM")


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
            return True
    except OSError:
        return False


def ask(port: int, body: dict[str, Any]) -> dict[str, Any]:
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
    asked.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", default="", help="the image to build on, as CUDA_IMAGE of the Dockerfile")
    parser.add_argument("--suite", default=apt_sources.own_suite(), help="of that base; default: this machine's own")
    parser.add_argument("--mirror", default="", help="its packages; default: where this machine takes its own from")
    parser.add_argument("--site", default="", help="a folder of files to add to that base, such as etc/pip.conf")
    parser.add_argument("--ca", default="", help="a file of certificate authorities that pip trusts while it builds")
    parser.add_argument("--check", action="store_true", help="look at the image that is there")
    words = sys.argv[1:]
    more = words[words.index("--") + 1 :] if "--" in words else []
    arguments = parser.parse_args(words[: len(words) - len(more) - ("--" in words)])
    if not (arguments.check or arguments.base):
        arguments.mirror = arguments.mirror or apt_sources.mirror_of(arguments.suite)
        if not arguments.mirror:
            parser.error(f"--mirror: /etc/apt has no source of {arguments.suite or 'a suite'}; name one, with --suite")
    if not arguments.check:
        build(arguments.base or make_base(arguments.suite, arguments.mirror, arguments.site), arguments.ca, more)
    check()


if __name__ == "__main__":
    main()
