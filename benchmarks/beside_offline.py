"""One engine's offline figures of one model, by the Python API that MeshLM and vLLM share: called by beside.py.

    python beside_offline.py meshlm|vllm MODEL --requests FILE --out FILE [--settings JSON] [--batches 1 64]

FILE of requests: a JSON list of [token ids, number of output tokens]. Nothing else of MeshLM is imported where vLLM is measured.
"""

import argparse
import importlib
import json
import random
import time
from pathlib import Path
from typing import Any

SETTINGS = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096}
OURS = {"max_num_batched_tokens": 16384, "max_num_seqs": 1024, "disable_log_requests": True}
WARM_UPS, PROMPT, ANSWER = 32, 512, 128


def timed(llm: Any, prompts: list[list[int]], params: Any) -> tuple[float, int]:
    """Seconds, and the tokens that came."""
    given = [{"prompt_token_ids": ids} for ids in prompts]
    begun = time.perf_counter()
    found = llm.generate(given, params, use_tqdm=False)
    elapsed = time.perf_counter() - begun
    return elapsed, sum(len(answer.outputs[0].token_ids) for answer in found)


def throughput(llm: Any, engine: Any, requests: list[tuple[list[int], int]]) -> dict[str, float]:
    """All requests at once."""
    prompts = [ids for ids, _ in requests]
    params = [engine.SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True) for _, count in requests]
    timed(llm, prompts[:WARM_UPS], params[:WARM_UPS])
    llm.reset_prefix_cache()
    elapsed, tokens = timed(llm, prompts, params)
    return {"elapsed_s": round(elapsed, 2), "output_tokens": tokens, "output_tokens_per_s": round(tokens / elapsed, 1)}


def latency_ms(llm: Any, engine: Any, batch: int) -> float:
    """Random ids in, so many out: the mean over the batches that follow two."""
    params = engine.SamplingParams(temperature=1.0, max_tokens=ANSWER, ignore_eos=True)
    draws, times = random.Random(batch), []
    for _ in range(2 + (5 if batch == 1 else 3)):
        llm.reset_prefix_cache()
        prompts = [[draws.randrange(1000, 9000) for _ in range(PROMPT)] for _ in range(batch)]
        times.append(timed(llm, prompts, params)[0])
    return round(sum(times[2:]) / len(times[2:]) * 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("engine", choices=("meshlm", "vllm"))
    parser.add_argument("model")
    parser.add_argument("--requests", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64])
    arguments = parser.parse_args()
    engine = importlib.import_module(arguments.engine)
    settings = SETTINGS | (OURS if arguments.engine == "meshlm" else {}) | arguments.settings
    begun = time.perf_counter()
    llm = engine.LLM(arguments.model, **settings)
    found: dict[str, Any] = {"start_s": round(time.perf_counter() - begun, 1)}
    out = Path(arguments.out)
    for batch in arguments.batches:
        found[f"batch_{batch}_ms"] = latency_ms(llm, engine, batch)
        out.write_text(json.dumps(found))  # what is known, if the rest takes too long
    requests = [(ids, count) for ids, count in json.loads(Path(arguments.requests).read_text())]
    if requests:
        found["offline"] = throughput(llm, engine, requests)
    out.write_text(json.dumps(found))
    if hasattr(llm, "shutdown"):
        llm.shutdown()


if __name__ == "__main__":
    main()
