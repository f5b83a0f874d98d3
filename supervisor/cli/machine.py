"""Commands that need no mesh: collect-env, keys and completion."""

import argparse
import json
import os
import platform
import sys

import zmq

from meshlm import __version__
from meshlm.runtime import nvidia_smi
from meshlm.supervisor.doctor.gpus import version_of
from meshlm.supervisor.errors import StartError, UsageError

PACKAGES = (
    *("torch", "triton", "pyzmq", "msgspec", "uvloop", "starlette", "uvicorn", "transformers", "tokenizers"),
    *("safetensors", "gguf", "numpy", "structlog"),
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    collect = commands.add_parser("collect-env", help="print what a bug report needs")
    collect.set_defaults(run=run_collect_env)

    about = "Make a new pair of keys; every node of the mesh needs a copy of the file (--key-file)."
    keys = commands.add_parser("keys", help="make the keys for a mesh of several nodes", description=about)
    keys.add_argument("file", help="where to write it, mode 0600; must not exist")
    keys.set_defaults(run=run_keys)

    about = "; ".join(f"{shell}: {how}" for shell, how in HOW.items()).replace("%", "%%")
    short = "print a script that lets a shell complete commands and flags"
    completion = commands.add_parser("completion", help=short, description=about)
    completion.add_argument("shell", nargs="?", help=f"{', '.join(SHELLS)}; default: the one of $SHELL")
    completion.set_defaults(run=run_completion)


def run_collect_env(arguments: argparse.Namespace) -> int:
    for name, value in facts().items():
        print(f"{name:<14} {value}")
    return 0


def facts() -> dict[str, str]:
    found = {
        "meshlm": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} usable",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB",
        "gpu": _gpu(),
    }
    return {**found, **{package: version_of(package) or "not installed" for package in PACKAGES}}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _gpu() -> str:
    try:
        found = nvidia_smi.query("name,memory.total,driver_version")
    except OSError as error:
        return f"unknown ({error})"
    return "none (no nvidia-smi)" if found is None else "; ".join(found)


def run_keys(arguments: argparse.Namespace) -> int:
    public, secret = zmq.curve_keypair()
    content = {"public_key": public.decode(), "secret_key": secret.decode()}
    try:
        fd = os.open(arguments.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{arguments.file} exists and is not overwritten") from None
    except OSError as error:
        raise StartError(f"{arguments.file}: {error.strerror}") from None
    with os.fdopen(fd, "w", encoding="ascii") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
    print(f"{arguments.file}: copy it to every node, readable by its user alone; public key {public.decode()}")
    return 0


SHELLS = ("bash", "zsh", "fish")
HOW = {
    "bash": "meshlm completion bash > ~/.local/share/bash-completion/completions/meshlm",
    "zsh": "meshlm completion zsh > ~/.zfunc/_meshlm, with `fpath+=~/.zfunc; autoload -Uz compinit; compinit` in ~/.zshrc",
    "fish": "meshlm completion fish > ~/.config/fish/completions/meshlm.fish",
}


def run_completion(arguments: argparse.Namespace) -> int:
    shell = arguments.shell or os.path.basename(os.environ.get("SHELL", ""))
    if shell not in SHELLS:
        name = shell or "a shell without a name"
        raise UsageError(f"completion: no script is there for {name}; for {', '.join(SHELLS)} there is")
    sys.stdout.write(script(shell))
    return 0


def script(shell: str) -> str:
    import shtab  # a part of a second that no other command needs

    from meshlm.supervisor.cli.main import parser_of

    return str(shtab.complete(parser_of([]), shell)) + "\n"
