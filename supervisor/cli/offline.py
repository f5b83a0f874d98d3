"""Commands that load a model once, keep what they found on disk and end: `meshlm tune` and `meshlm save-sharded-state`."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from meshlm.protocol.config import MeshConfig
from meshlm.runtime.sharded_state import Request
from meshlm.supervisor.api.llm import LLM
from meshlm.supervisor.errors import StartError, UsageError
from meshlm.supervisor.settings import flags
from meshlm.supervisor.settings.resolve import resolve
from meshlm.supervisor.settings.sizes import parse_bytes


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    tune = commands.add_parser(
        "tune",
        help="measure kernels for a model's sizes on this GPU, and keep what is fastest",
        description="Starts the model with the flags of `meshlm serve`, has its workers measure (--tune full, unless given) and ends. "
        "With --tuning-dir the tables are written there: they can be copied to machines with the same GPU and versions, or committed.",
    )
    flags.add_flags(tune)
    tune.set_defaults(run=run_tune)

    save = commands.add_parser(
        "save-sharded-state",
        help="write each worker's weights into files of its own",
        description="Splits, converts and quantises the weights once, for the ranks, dtype and quantisation that the flags of "
        "`meshlm serve` say. `meshlm serve FOLDER --load-format sharded_state` with the same flags reads only what each worker has.",
    )
    save.add_argument("--output", required=True, metavar="FOLDER", help="a folder that is not there yet, or empty")
    size = "of one file (default 5G)"
    save.add_argument("--max-file-size", type=parse_bytes, default=5 << 30, metavar="BYTES", help=size)
    flags.add_flags(save)
    save.set_defaults(run=run_save_sharded_state)


def run_tune(arguments: argparse.Namespace) -> int:
    given = flags.given(arguments)
    if "tuning_dir" in given:
        given["tuning_dir"] = str(Path(str(given["tuning_dir"])).absolute())
    LLM(**{"tune": "full", "enforce_eager": True, **given}).shutdown()
    folder = given.get("tuning_dir")
    if folder is None:
        print("What was measured is kept in the user's cache; the workers' log names the folder.")
        return 0
    for line in tables_in(Path(str(folder))):
        print(line)
    return 0


def tables_in(folder: Path) -> list[str]:
    lines = []
    for path in sorted(folder.glob("*/tables/*.json")):
        products = json.loads(path.read_text("utf-8"))["products"]
        won = sum(bool(entry["rows"]) for entry in products)
        lines.append(f"{path}: {len(products)} sizes, {won} of them faster than the plain way")
    return lines or [f"{folder}: no table; nothing was to be measured on this device"]


_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors.index.json", "*.bin.index.json")
_FIRST_LEVEL_ONLY = (".*", "original")


def run_save_sharded_state(arguments: argparse.Namespace) -> int:
    config = resolve(flags.build(flags.given(arguments), None))
    output = Path(arguments.output)
    save(config, output, arguments.max_file_size)
    print(f"{output}: serve it with --load-format sharded_state")
    return 0


def save(config: MeshConfig, output: Path, max_bytes: int) -> None:
    """UsageError for what cannot be saved, StartError where a rank fails."""
    resolved = config.require_resolved()
    if resolved.load_format in ("gguf", "sharded_state") or resolved.spec.transformers is not None:
        kind = "--model-impl transformers" if resolved.spec.transformers is not None else resolved.load_format
        raise UsageError(f"save-sharded-state: {resolved.model_path} ({kind}) has no state that could be saved")
    if config.experts.enable_expert_parallel:
        raise UsageError("save-sharded-state: --enable-expert-parallel spreads experts over all ranks; leave it out")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output}: it is there, and not empty")
    source = Path(resolved.model_path)
    ignored = shutil.ignore_patterns(*_FIRST_LEVEL_ONLY)
    weights = shutil.ignore_patterns(*_WEIGHTS)

    def left_out(folder: str, files: list[str]) -> set[str]:
        """Weights of sentence-transformers' modules are in folders of their own, and are kept."""
        here = Path(folder) == source
        return ignored(folder, files) | (weights(folder, files) if here else set())

    shutil.copytree(source, output, ignore=left_out, dirs_exist_ok=True)
    for rank in range(config.parallel.workers_per_rank):
        _save_rank(Request(config, rank, str(output.absolute()), max_bytes))


def _save_rank(request: Request) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "meshlm.workers.weights.sharded_state"],
        input=msgspec.json.encode(request),
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.stdout.strip():
        raise StartError(f"rank {request.rank}: {json.loads(done.stdout.splitlines()[-1])['error']}")
    if done.returncode:
        raise StartError(f"rank {request.rank}: the process that saves it has failed")
