"""`meshlm bench throughput`, `latency` and `startup`: measurements of the Python API, without a server.

A start is measured in a new process. A cold one keeps kernels and tuned tiles in a folder of its own, which is then removed; what a
model hub was asked for stays where it is, and so does what the operating system has read of the files.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshlm.supervisor.api.llm import LLM
from meshlm.supervisor.api.outputs import RequestOutput
from meshlm.supervisor.api.sampling import SamplingParams
from meshlm.supervisor.bench import data, results, serve_flags
from meshlm.supervisor.bench.data import Lengths, Sample, check_fits, random_ids
from meshlm.supervisor.bench.results import percentiles
from meshlm.supervisor.bench.serve_flags import at_least
from meshlm.supervisor.errors import StartError, UsageError, raised_as
from meshlm.supervisor.settings import flags, vllm_flags

PERCENTILES = [10.0, 25.0, 50.0, 75.0, 90.0, 99.0]
DATASETS = ("random", "prefix_repetition", "sharegpt", "sonnet", "hf")
# Flags of vLLM's that are refused, and what to do instead.
ABSENT = {
    **{flag: why for flag, why in serve_flags.ABSENT.items() if "--asr" in flag or "-mm-" in flag},
    **{flag: serve_flags.ABSENT[flag] for flag in ("--random-batch-size", "--no-reranker", "--hf-name")},
    **dict.fromkeys(("--lora-path", "--lora-assignment"), "bench serve asks a server that has it: --served-model-name"),
    **dict.fromkeys(("--hf-max-batch-size", "--hf-enable-torch-compile"), "--backend vllm is the setting: this mesh"),
    "--enable-multimodal-chat": serve_flags.ABSENT["--enable-multimodal-chat"],
    "--custom-output-len": "the data set custom is one of bench serve",
    "--prequeue-requests": "requests begin as they come, as with every client",
}


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    throughput = kinds.add_parser("throughput", help="tokens per second of many requests at once")
    flags.add_flags(throughput)
    add = throughput.add_argument
    add("--backend", choices=["vllm"], help="vllm: this mesh")
    add("--dataset-name", choices=DATASETS, help="default: sharegpt with --dataset-path, else random")
    add("--dataset", help="the older name of --dataset-path")
    serve_flags.add_dataset_flags(throughput)
    add("--prefix-len", type=int, help="of random and sonnet: tokens that all prompts share")
    add("--num-warmups", type=int, default=0)
    add("--n", type=int, default=1)
    add("--disable-detokenize", action="store_true", help="token ids alone")
    add("--async-engine", action="store_true", help=argparse.SUPPRESS)  # the mesh is what it asks for
    add("--profile", action="store_true", help="into a trace")
    add("--profile-dir", default="meshlm_profile", help="directory for that trace")
    add("--output-json", type=Path, help="file for the results")
    vllm_flags.refuse(throughput, ABSENT)
    throughput.set_defaults(run=run_throughput, disable_shuffle=False, no_stream=False, **serve_flags.OWN_LENGTHS)

    latency = kinds.add_parser("latency", help="wall time of one batch")
    flags.add_flags(latency)
    add = latency.add_argument
    add("--input-len", type=int, default=32)
    add("--output-len", type=int, default=128)
    add("--batch-size", type=int, default=8)
    add("--n", type=int, default=1, help="sequences per prompt")
    add("--num-iters-warmup", type=int, default=10)
    add("--num-iters", type=int, default=30)
    add("--profile", action="store_true", help="after measuring, one more iteration into a trace")
    add("--profile-dir", default="meshlm_profile", help="directory for that trace")
    add("--output-json", type=Path, help="file for the results")
    add("--disable-detokenize", action="store_true", help="token ids alone")
    vllm_flags.refuse(latency, {"--use-beam-search": "beam search is not there"})
    latency.set_defaults(run=run_latency)

    startup = kinds.add_parser("startup", help="time until a model can be asked")
    flags.add_flags(startup)
    add = startup.add_argument
    add("--num-iters-cold", type=int, default=3, help="starts without kernels of earlier ones")
    add("--num-iters-warmup", type=int, default=1, help="starts before those with kernels, not counted")
    add("--num-iters-warm", type=int, default=3, help="starts with the kernels of earlier ones")
    add("--output-json", type=Path, help="file for the results")
    startup.set_defaults(run=run_startup)


@contextlib.contextmanager
def _mesh(arguments: argparse.Namespace, **usual: Any) -> Iterator[LLM]:
    """A model with the flags of a command, and with a folder for its traces where it is to be profiled."""
    traces = {"profiler_dir": str(Path(arguments.profile_dir).absolute())} if arguments.profile else {}
    llm = LLM(**{**usual, **flags.given(arguments), **traces})
    try:
        yield llm
    finally:
        llm.shutdown()


@contextlib.contextmanager
def _profiled(llm: LLM, wanted: bool) -> Iterator[None]:
    if wanted:
        llm.start_profile()
    yield
    for path in llm.stop_profile() if wanted else ():
        print(f"Profiler trace: {path}")


def run_throughput(arguments: argparse.Namespace) -> int:
    _check_throughput(arguments)
    with _mesh(arguments) as llm, raised_as(UsageError, ValueError):  # such as for a prompt longer than the context
        elapsed, outputs = _measure_throughput(llm, arguments, getattr(arguments, "seed", 0))
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(o.token_ids) for output in outputs for o in output.outputs)
    total = prompt_tokens + output_tokens
    print(
        f"Throughput: {len(outputs) / elapsed:.2f} requests/s, {total / elapsed:.2f} total tokens/s, "
        f"{output_tokens / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {prompt_tokens}")
    print(f"Total num output tokens:  {output_tokens}")
    result = {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": total,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": total / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
    }
    results.write(arguments.output_json, result)
    return 0


def _check_throughput(arguments: argparse.Namespace) -> None:
    arguments.dataset_path = arguments.dataset_path or arguments.dataset
    if arguments.dataset_name is None:
        arguments.dataset_name = "sharegpt" if arguments.dataset_path else "random"
    serve_flags.check_dataset(arguments)
    serve_flags.at_least(1, arguments, "n")
    serve_flags.at_least(0, arguments, "num_warmups", "prefix_len")
    serve_flags.random_lengths(arguments)
    if arguments.prefix_len is not None:
        arguments.random_prefix_len = arguments.sonnet_prefix_len = arguments.prefix_len
    results.claim("--output-json", arguments.output_json)


def _measure_throughput(llm: LLM, arguments: argparse.Namespace, seed: int) -> tuple[float, list[RequestOutput]]:
    samples = serve_flags.samples(arguments, _Texts(llm), llm.vocab_size, seed, as_text=False)
    data.check_fits(samples, llm.max_model_len)
    if arguments.num_warmups:
        warm = data.random_ids(arguments.num_warmups, data.Lengths(64, 16), llm.vocab_size, seed + 1)
        _generate(llm, warm, arguments)
    with _profiled(llm, arguments.profile):
        begun = time.perf_counter()
        outputs = _generate(llm, samples, arguments)
        elapsed = time.perf_counter() - begun
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


def _generate(llm: LLM, samples: list[Sample], arguments: argparse.Namespace) -> list[RequestOutput]:
    return llm.generate([s.prompt for s in samples], [_params(arguments, s.output_len) for s in samples])


def _params(arguments: argparse.Namespace, output_len: int) -> SamplingParams:
    keeps_text = not arguments.disable_detokenize
    options = {"n": arguments.n, "max_tokens": output_len, "detokenize": keeps_text}
    return SamplingParams(temperature=1.0, ignore_eos=True, **options)


def run_latency(arguments: argparse.Namespace) -> int:
    at_least(1, arguments, "input_len", "output_len", "batch_size", "n", "num_iters")
    at_least(0, arguments, "num_iters_warmup")
    results.claim("--output-json", arguments.output_json)
    with _mesh(arguments, enable_prefix_caching=False) as llm:
        latencies = _measure_latency(llm, arguments)
    average = sum(latencies) / len(latencies)
    found = percentiles(latencies, PERCENTILES)
    print(f"Avg latency: {average} seconds")
    for percent, value in found.items():
        print(f"{percent:.0f}% percentile latency: {value} seconds")
    by_percent = {f"{p:.0f}": v for p, v in found.items()}
    results.write(arguments.output_json, {"avg_latency": average, "latencies": latencies, "percentiles": by_percent})
    return 0


def _measure_latency(llm: LLM, arguments: argparse.Namespace) -> list[float]:
    """Seconds of each iteration."""
    params = _params(arguments, arguments.output_len)
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
        with _profiled(llm, True):
            iterate(num_warmups + arguments.num_iters)
    return found


def run_startup(arguments: argparse.Namespace) -> int:
    at_least(1, arguments, "num_iters_cold", "num_iters_warm")
    at_least(0, arguments, "num_iters_warmup")
    results.claim("--output-json", arguments.output_json)
    settings = flags.given(arguments)
    found: dict[str, Any] = {}
    for kind, count in (("cold", arguments.num_iters_cold), ("warm", arguments.num_iters_warm)):
        for _ in range(arguments.num_iters_warmup if kind == "warm" else 0):
            started(settings, {})
        seconds = [_cold(settings) if kind == "cold" else started(settings, {}) for _ in range(count)]
        found |= summary(kind, seconds)
        _print_startup(kind, found)
    results.write(arguments.output_json, found)
    return 0


def summary(kind: str, seconds: list[float]) -> dict[str, Any]:
    """Seconds of starts, by the keys of `vllm bench startup`."""
    return {
        f"avg_{kind}_startup_time": sum(seconds) / len(seconds),
        f"{kind}_startup_times": seconds,
        f"{kind}_startup_percentiles": {f"{p:.0f}": value for p, value in percentiles(seconds, PERCENTILES).items()},
    }


def cold_environment(folder: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables under which a process finds no kernels of earlier ones. The hub's files lie beside the usual caches."""
    usual = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {
        "XDG_CACHE_HOME": folder,
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "HF_HOME": environment.get("HF_HOME") or str(usual / "huggingface"),
    }


def _cold(settings: dict[str, Any]) -> float:
    with TemporaryDirectory(prefix="meshlm-cold-") as folder:
        return started(settings, cold_environment(folder, os.environ))


def started(settings: dict[str, Any], environment: dict[str, str]) -> float:
    """Seconds that `LLM(**settings)` takes in a process of its own. StartError, UsageError as there."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        try:
            return process.submit(_start, settings, environment).result()
        except BrokenProcessPool:
            raise StartError("the process that should start the model ended; its lines above say why") from None


def _start(settings: dict[str, Any], environment: dict[str, str]) -> float:
    os.environ.update(environment)
    begun = time.perf_counter()
    llm = LLM(**settings)
    seconds = time.perf_counter() - begun
    llm.shutdown()
    return seconds


def _print_startup(kind: str, found: dict[str, Any]) -> None:
    print(f"Avg {kind} startup time: {found[f'avg_{kind}_startup_time']:.2f} seconds")
    for percent, value in found[f"{kind}_startup_percentiles"].items():
        print(f"{percent}% percentile {kind} startup time: {value:.2f} seconds")
