"""A lone request's decode step of dense models, beside the time of reading their weights: the engine alone, dummy weights, bfloat16.

    python -P benchmarks/dense_steps.py FOLDER ... [--context 512] [--json FILE] [flags of `meshlm serve` with a value each]

FOLDER: of a model, as benchmarks/shapes.py writes it. `of_floor` is the step over the bytes of the weights that it reads, at 4.3 TB/s;
an embedding that is not the head's weight is not read.
"""

import argparse
import gc
import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import engine_step

from meshlm.architectures.registry import weights_of
from meshlm.runtime.model_files.model_config import parse_config

BYTES, BYTES_A_SECOND = 2, 4.3e12
EMBEDDING = "model.embed_tokens.weight"
STEPS = 60


def bytes_read(config: dict[str, Any], folder: Path) -> int:
    """Of weights, by a step of one token, in bfloat16."""
    weights = weights_of(parse_config(config, folder)[0])
    read = [name for name in weights if name != EMBEDDING or "lm_head.weight" not in weights]
    return sum(BYTES * prod(weights[name].shape) for name in read)


def config_of(folder: Path) -> dict[str, Any]:
    """Its config.json."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return found


def measure(folder: Path, context: int, extra: list[str]) -> dict[str, Any]:
    read = bytes_read(config_of(folder), folder)
    engine = engine_step.make_engine(str(folder), extra)
    found = engine_step.measure(engine, 1, context, STEPS, kernels=False)
    floor_ms = read / BYTES_A_SECOND * 1e3
    kept = {name: found[name] for name in ("step_ms", "graph_ms", "host_ms")}
    of_floor = round(found["step_ms"] / floor_ms, 3)
    return {
        "model": folder.name,
        "weights_gb": round(read / 1e9, 2),
        "floor_ms": round(floor_ms, 3),
        **kept,
        "of_floor": of_floor,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--json")
    given, extra = parser.parse_known_args()
    quantised = [folder.name for folder in given.folders if "quantization_config" in config_of(folder)]
    if quantised or any(word.startswith("--quantization") for word in extra):
        parser.error(f"weights are bfloat16 here, so no --quantization and no quantised models: {', '.join(quantised)}")
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "context": given.context}
    report["results"] = []
    for folder in given.folders:
        report["results"].append(measure(folder, given.context, extra))
        print(json.dumps(report["results"][-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if given.json:
            Path(given.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
