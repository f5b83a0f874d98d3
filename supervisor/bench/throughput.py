"""`meshlm bench throughput`: many requests at once through the Python API, tokens per second."""

import argparse
import json
import time
from pathlib import Path

from meshlm.supervisor import flags
from meshlm.supervisor.bench.data import Sample, random_ids, sharegpt
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.llm import LLM, RequestOutput, SamplingParams


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser("throughput", help="tokens per second of many requests at once")
    flags.add_flags(parser)
    parser.add_argument("--dataset-name", choices=["random", "sharegpt"], default="random")
    parser.add_argument("--dataset-path", help="ShareGPT's JSON file")
    parser.add_argument("--input-len", type=int, default=512, help="random: prompt tokens")
    parser.add_argument("--output-len", type=int, help="output tokens; sharegpt: default as long as the answer")
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--num-warmups", type=int, default=0)
    parser.add_argument("--n", type=int, default=1)
    parser.add_argument("--output-json", help="file for the results")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    names = {setting.name for setting in flags.settings()}
    llm = LLM(**{k: v for k, v in vars(arguments).items() if k in names})
    seed = getattr(arguments, "seed", 0)
    if arguments.dataset_name == "sharegpt":
        if not arguments.dataset_path:
            raise UsageError("--dataset-path: needed with --dataset-name sharegpt")
        samples = sharegpt(arguments.dataset_path, arguments.num_prompts, llm.encode, arguments.output_len, seed)
    else:
        samples = random_ids(
            arguments.num_prompts, arguments.input_len, arguments.output_len or 128, llm.vocab_size, seed
        )
    if arguments.num_warmups:
        warm = random_ids(arguments.num_warmups, 64, 16, llm.vocab_size, seed + 1)
        _generate(llm, warm, arguments.n)
    begun = time.perf_counter()
    outputs = _generate(llm, samples, arguments.n)
    elapsed = time.perf_counter() - begun
    llm.shutdown()
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(o.token_ids) for output in outputs for o in output.outputs)
    total = prompt_tokens + output_tokens
    print(
        f"Throughput: {len(samples) / elapsed:.2f} requests/s, {total / elapsed:.2f} total tokens/s, "
        f"{output_tokens / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {prompt_tokens}")
    print(f"Total num output tokens:  {output_tokens}")
    if arguments.output_json:
        result = {
            "elapsed_time": elapsed,
            "num_requests": len(samples),
            "total_num_tokens": total,
            "requests_per_second": len(samples) / elapsed,
            "tokens_per_second": total / elapsed,
            "output_tokens_per_second": output_tokens / elapsed,
        }
        Path(arguments.output_json).write_text(json.dumps(result, indent=1))
    return 0


def _generate(llm: LLM, samples: list[Sample], n: int) -> list[RequestOutput]:
    params = [SamplingParams(n=n, temperature=1.0, max_tokens=s.output_len, ignore_eos=True) for s in samples]
    return llm.generate([s.prompt for s in samples], params)
