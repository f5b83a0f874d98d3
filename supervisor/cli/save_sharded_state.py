"""`meshlm save-sharded-state MODEL --output FOLDER`: a model as its workers have it, for --load-format sharded_state."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from meshlm.protocol.config import MeshConfig
from meshlm.runtime.sharded_state import Request
from meshlm.supervisor.errors import StartError, UsageError
from meshlm.supervisor.settings import flags
from meshlm.supervisor.settings.resolve import resolve
from meshlm.supervisor.settings.sizes import parse_bytes

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors.index.json", "*.bin.index.json")
_FIRST_LEVEL_ONLY = (".*", "original")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "save-sharded-state",
        help="write each worker's weights into files of its own",
        description="Splits, converts and quantises the weights once, for the ranks, dtype and quantisation that the flags of "
        "`meshlm serve` say. `meshlm serve FOLDER --load-format sharded_state` with the same flags reads only what each worker has.",
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a folder that is not there yet, or empty")
    parser.add_argument(
        "--max-file-size", type=parse_bytes, default=5 << 30, metavar="BYTES", help="of one file (default 5G)"
    )
    flags.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    config = resolve(flags.build(flags.given(arguments), None))
    output = Path(arguments.output)
    save(config, output, arguments.max_file_size)
    print(f"{output}: serve it with --load-format sharded_state")
    return 0


def save(config: MeshConfig, output: Path, max_bytes: int) -> None:
    """UsageError for what cannot be saved, StartError where a rank fails."""
    resolved = config.resolved
    assert resolved is not None
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
