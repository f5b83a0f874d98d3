"""A model over several GPUs, in one layout after another: a batch's latency and the ShareGPT requests, each layout in one start.

    python -P benchmarks/layouts.py MODEL --sharegpt FILE --layouts "" "-tp 2 -ep" "-dp 2 -ep --enable-dbo" [--lat 1 64] [--json FILE]

The workloads are `lat` and `offline` of docs/performance.md, as vLLM's own benchmarks measure them. Dummy weights, bfloat16.
"""

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from meshlm import LLM, SamplingParams
from meshlm.supervisor.bench import data
from meshlm.supervisor.settings import flags

SETTINGS: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096}
SETTINGS |= {"max_num_batched_tokens": 16384, "max_num_seqs": 1024, "disable_log_requests": True}


def latency_ms(llm: LLM, batch: int, repeats: int) -> float:
    """512 random tokens in, 128 out: the mean over the batches that follow two."""
    params, times = SamplingParams(temperature=1.0, max_tokens=128, ignore_eos=True), []
    for seed in range(2 + repeats):
        samples = data.random_ids(batch, data.Lengths(512, 128), llm.vocab_size, seed=seed)
        begun = time.perf_counter()
        llm.generate([sample.prompt for sample in samples], params, use_tqdm=False)
        times.append(time.perf_counter() - begun)
    return round(sum(times[2:]) / repeats * 1e3, 1)


def offline(llm: LLM, path: str, count: int) -> dict[str, float]:
    samples = data.sharegpt(data.Reading(path, count, 0, oversample=True), llm.encode, None)
    params = [SamplingParams(temperature=1.0, max_tokens=sample.output_len, ignore_eos=True) for sample in samples]
    begun = time.perf_counter()
    found = llm.generate([sample.prompt for sample in samples], params, use_tqdm=False)
    elapsed = time.perf_counter() - begun
    tokens = sum(len(output.token_ids) for answer in found for output in answer.outputs)
    return {"elapsed_s": round(elapsed, 2), "output_tokens": tokens, "output_tokens_per_s": round(tokens / elapsed, 1)}


def measure(arguments: argparse.Namespace, layout: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    given = vars(parser.parse_args(shlex.split(layout)))
    found: dict[str, Any] = {"layout": layout}
    begun = time.perf_counter()
    llm = LLM(arguments.model, **{**SETTINGS, **given})
    found["start_s"] = round(time.perf_counter() - begun, 1)
    try:
        found["lat_ms"] = {f"batch_{batch}": latency_ms(llm, batch, 5 if batch == 1 else 3) for batch in arguments.lat}
        if arguments.sharegpt:
            found["offline"] = offline(llm, arguments.sharegpt, arguments.requests)
    finally:
        llm.shutdown()
    gpus = given.get("data_parallel_size", 1) * given.get("tensor_parallel_size", 1)
    if "offline" in found:
        found["offline"]["per_gpu"] = round(found["offline"]["output_tokens_per_s"] / gpus, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--layouts", nargs="+", default=[""])
    parser.add_argument("--lat", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--sharegpt", help="sharegpt_1000.json")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "commit": os.environ.get("COMMIT", ""),
        "layouts": [],
    }
    report["cpu_cores"] = len(os.sched_getaffinity(0))
    for layout in arguments.layouts:
        try:
            report["layouts"].append(measure(arguments, layout))
        except Exception as error:  # the others are still to be measured
            report["layouts"].append({"layout": layout, "error": f"{type(error).__name__}: {error}"[:400]})
        print(json.dumps(report["layouts"][-1]), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
