"""`meshlm bench latency`: one batch of equal requests, wall time of the whole batch."""

import argparse
import time
from pathlib import Path

from meshlm.supervisor.api.llm import LLM, SamplingParams
from meshlm.supervisor.bench import results
from meshlm.supervisor.bench.data import Lengths, check_fits, random_ids
from meshlm.supervisor.bench.results import percentiles
from meshlm.supervisor.bench.serve_flags import at_least
from meshlm.supervisor.settings import flags, vllm_flags

PERCENTILES = [10.0, 25.0, 50.0, 75.0, 90.0, 99.0]


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser("latency", help="wall time of one batch")
    flags.add_flags(parser)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--n", type=int, default=1, help="sequences per prompt")
    parser.add_argument("--num-iters-warmup", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="after measuring, one more iteration into a trace")
    parser.add_argument("--profile-dir", default="meshlm_profile", help="directory for that trace")
    parser.add_argument("--output-json", help="file for the results")
    parser.add_argument("--disable-detokenize", action="store_true", help="token ids alone")
    vllm_flags.refuse(parser, {"--use-beam-search": "beam search is not there"})


def run(arguments: argparse.Namespace) -> int:
    at_least(1, arguments, "input_len", "output_len", "batch_size", "n", "num_iters")
    at_least(0, arguments, "num_iters_warmup")
    if arguments.output_json:
        results.claim("--output-json", Path(arguments.output_json))
    settings = {"enable_prefix_caching": False, **flags.given(arguments)}
    if arguments.profile:
        settings["profiler_dir"] = str(Path(arguments.profile_dir).absolute())
    llm = LLM(**settings)
    try:
        latencies = _measure(llm, arguments)
    finally:
        llm.shutdown()
    average = sum(latencies) / len(latencies)
    found = percentiles(latencies, PERCENTILES)
    print(f"Avg latency: {average} seconds")
    for percent, value in found.items():
        print(f"{percent:.0f}% percentile latency: {value} seconds")
    if arguments.output_json:
        result = {
            "avg_latency": average,
            "latencies": latencies,
            "percentiles": {f"{p:.0f}": v for p, v in found.items()},
        }
        results.write(Path(arguments.output_json), result)
    return 0


def _measure(llm: LLM, arguments: argparse.Namespace) -> list[float]:
    """Seconds of each iteration."""
    params = SamplingParams(
        n=arguments.n,
        temperature=1.0,
        max_tokens=arguments.output_len,
        ignore_eos=True,
        detokenize=not arguments.disable_detokenize,
    )
    lengths = Lengths(arguments.input_len, arguments.output_len)

    def iterate(seed: int) -> float:
        samples = random_ids(arguments.batch_size, lengths, llm.vocab_size, seed=seed)
        check_fits(samples, llm.max_model_len)
        begun = time.perf_counter()
        llm.generate([s.prompt for s in samples if isinstance(s.prompt, list)], params, use_tqdm=False)
        return time.perf_counter() - begun

    num_warmups = arguments.num_iters_warmup
    found = [iterate(iteration) for iteration in range(num_warmups + arguments.num_iters)][num_warmups:]
    if arguments.profile:
        llm.start_profile()
        iterate(num_warmups + arguments.num_iters)
        for path in llm.stop_profile():
            print(f"Profiler trace: {path}")
    return found
