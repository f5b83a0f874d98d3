"""`meshlm bench throughput`: many requests at once through the Python API, tokens per second."""

import argparse
import time
from pathlib import Path

from meshlm.supervisor.api.llm import LLM, RequestOutput, SamplingParams
from meshlm.supervisor.bench import data, results, serve_flags
from meshlm.supervisor.bench.data import Sample
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, vllm_flags

DATASETS = ("random", "prefix_repetition", "sharegpt", "sonnet", "hf")
# Flags of vLLM's that are refused, and what to do instead.
ABSENT = {
    **{flag: why for flag, why in serve_flags.ABSENT.items() if "--asr" in flag or "-mm-" in flag},
    **dict.fromkeys(
        ("--random-batch-size", "--no-reranker"),
        "only texts are measured; benchmarks/embeddings.py measures embeddings",
    ),
    **dict.fromkeys(("--lora-path", "--lora-assignment"), "LoRA adapters are not there yet"),
    **dict.fromkeys(("--hf-max-batch-size", "--hf-enable-torch-compile"), "--backend vllm is the setting: this mesh"),
    "--hf-name": serve_flags.ABSENT["--hf-name"],
    "--enable-multimodal-chat": serve_flags.ABSENT["--enable-multimodal-chat"],
    "--custom-output-len": "the data set custom is one of bench serve",
    "--prequeue-requests": "requests begin as they come, as with every client",
}


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser("throughput", help="tokens per second of many requests at once")
    flags.add_flags(parser)
    parser.add_argument("--backend", choices=["vllm"], help="vllm: this mesh")
    parser.add_argument("--dataset-name", choices=DATASETS, help="default: sharegpt with --dataset-path, else random")
    parser.add_argument("--dataset", help="the older name of --dataset-path")
    serve_flags.add_dataset_flags(parser)
    parser.add_argument("--prefix-len", type=int, help="of random and sonnet: tokens that all prompts share")
    parser.add_argument("--num-warmups", type=int, default=0)
    parser.add_argument("--n", type=int, default=1)
    parser.add_argument("--disable-detokenize", action="store_true", help="token ids alone")
    parser.add_argument("--async-engine", action="store_true", help=argparse.SUPPRESS)  # the mesh is what it asks for
    parser.add_argument("--profile", action="store_true", help="into a trace")
    parser.add_argument("--profile-dir", default="meshlm_profile", help="directory for that trace")
    parser.add_argument("--output-json", help="file for the results")
    vllm_flags.refuse(parser, ABSENT)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    settings = flags.given(arguments)
    if arguments.profile:
        settings["profiler_dir"] = str(Path(arguments.profile_dir).absolute())
    llm = LLM(**settings)
    try:
        elapsed, outputs = _measure(llm, arguments, getattr(arguments, "seed", 0))
    except ValueError as error:  # such as a prompt that is longer than the context
        raise UsageError(str(error)) from None
    finally:
        llm.shutdown()
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(o.token_ids) for output in outputs for o in output.outputs)
    total = prompt_tokens + output_tokens
    print(
        f"Throughput: {len(outputs) / elapsed:.2f} requests/s, {total / elapsed:.2f} total tokens/s, "
        f"{output_tokens / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {prompt_tokens}")
    print(f"Total num output tokens:  {output_tokens}")
    if arguments.output_json:
        result = {
            "elapsed_time": elapsed,
            "num_requests": len(outputs),
            "total_num_tokens": total,
            "requests_per_second": len(outputs) / elapsed,
            "tokens_per_second": total / elapsed,
            "output_tokens_per_second": output_tokens / elapsed,
        }
        results.write(Path(arguments.output_json), result)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """UsageError names the flag."""
    arguments.dataset_path = arguments.dataset_path or arguments.dataset
    if arguments.dataset_name is None:
        arguments.dataset_name = "sharegpt" if arguments.dataset_path else "random"
    serve_flags.check_dataset(arguments)
    serve_flags.at_least(1, arguments, "n")
    serve_flags.at_least(0, arguments, "num_warmups", "prefix_len")
    serve_flags.random_lengths(arguments)
    if arguments.prefix_len is not None:
        arguments.random_prefix_len = arguments.prefix_len
    if arguments.output_json:
        results.claim("--output-json", Path(arguments.output_json))


def _measure(llm: LLM, arguments: argparse.Namespace, seed: int) -> tuple[float, list[RequestOutput]]:
    """Seconds, and what came."""
    samples = _samples(llm, arguments, seed)
    data.check_fits(samples, llm.max_model_len)
    keep_text = not arguments.disable_detokenize
    if arguments.num_warmups:
        warm = data.random_ids(arguments.num_warmups, data.Lengths(64, 16), llm.vocab_size, seed + 1)
        _generate(llm, warm, arguments.n, keep_text)
    if arguments.profile:
        llm.start_profile()
    begun = time.perf_counter()
    outputs = _generate(llm, samples, arguments.n, keep_text)
    elapsed = time.perf_counter() - begun
    for path in llm.stop_profile() if arguments.profile else ():
        print(f"Profiler trace: {path}")
    return elapsed, outputs


class _Texts:
    """The tokenizer of the mesh that is measured (data.Texts)."""

    def __init__(self, llm: LLM) -> None:
        self._tokenizer, self.encode = llm.get_tokenizer(), llm.encode

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def chat(self, text: str) -> list[int]:
        found = self._tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        assert not isinstance(found, str)
        return found


def _samples(llm: LLM, arguments: argparse.Namespace, seed: int) -> list[Sample]:
    path, count = arguments.dataset_path or "", arguments.num_prompts
    reading = data.Reading(path, count, seed, oversample=not arguments.no_oversample)
    match arguments.dataset_name:
        case "random":
            return data.random_ids(count, serve_flags.random_lengths(arguments), llm.vocab_size, seed)
        case "prefix_repetition":
            return serve_flags.prefix_repetition(arguments, llm.vocab_size, seed)
        case "sharegpt":
            return data.sharegpt(reading, llm.encode, arguments.output_len)
        case "sonnet":
            prefix_len = 200 if arguments.prefix_len is None else arguments.prefix_len
            lengths = data.Lengths(arguments.input_len or 550, arguments.output_len or 150, prefix_len)
            return data.sonnet(reading, _Texts(llm), lengths, as_text=False)
        case _:
            rows = data.rows_of_hub(path, arguments.hf_subset, arguments.hf_split, stream=True)
            return data.hugging_face(reading, llm.encode, rows.shuffle(seed=seed), arguments.output_len)


def _generate(llm: LLM, samples: list[Sample], n: int, keep_text: bool) -> list[RequestOutput]:
    params = [
        SamplingParams(n=n, temperature=1.0, max_tokens=s.output_len, ignore_eos=True, detokenize=keep_text)
        for s in samples
    ]
    return llm.generate([s.prompt for s in samples], params)
