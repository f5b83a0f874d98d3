"""The flags of `vllm bench serve`, and what is wrong with their values before anything is sent. Used by serve.py."""

import argparse
import json
import math
import uuid
from typing import Any

from meshlm.supervisor.bench import data
from meshlm.supervisor.bench.results import METRICS
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import vllm_flags

DATASETS = ("random", "prefix_repetition", "sharegpt", "sonnet", "custom", "hf")
ENDPOINTS = {"openai-chat": "/v1/chat/completions"}
SAMPLING = ("top_p", "top_k", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty")
_MEDIA = "only text is sent"
_OTHER = f"the data sets are {', '.join(DATASETS)}"
_TRACE = "--request-rate, --burstiness and --ramp-up-strategy say when requests are sent"
_EMBEDDINGS = "only texts are measured; benchmarks/embeddings.py measures embeddings"
_PLOTS = "--save-detailed writes what a plot needs"
# Where neither --input-len, --output-len nor a flag of the data set says it.
OWN_LENGTHS = {
    "sonnet_input_len": 550,
    "sonnet_output_len": 150,
    "sonnet_prefix_len": 200,
    **dict.fromkeys(("sharegpt_output_len", "hf_output_len")),
}
# Flags of vLLM's that are refused, and what to do instead.
ABSENT = {
    **dict.fromkeys(("--enable-multimodal-chat", "--custom-ensure-client-side-data"), _MEDIA),
    **dict.fromkeys(("--asr-max-audio-len-sec", "--asr-min-audio-len-sec"), _MEDIA),
    **dict.fromkeys(("--random-mm-base-items-per-request", "--random-mm-num-mm-items-range-ratio"), _MEDIA),
    **dict.fromkeys(("--random-mm-limit-mm-per-prompt", "--random-mm-bucket-config"), _MEDIA),
    **dict.fromkeys(("--spec-bench-output-len", "--spec-bench-category", "--bfcl-categories"), _OTHER),
    **dict.fromkeys(("--blazedit-min-distance", "--blazedit-max-distance"), _OTHER),
    **dict.fromkeys(("--speed-bench-dataset-subset", "--speed-bench-output-len", "--speed-bench-category"), _OTHER),
    **dict.fromkeys(("--timed-trace-chunk-hash-size", "--timed-trace-sec-multiplier"), _TRACE),
    **dict.fromkeys(("--timed-trace-label-timestamp", "--timed-trace-label-input-length"), _TRACE),
    **dict.fromkeys(("--timed-trace-label-output-length", "--timed-trace-label-hash-ids"), _TRACE),
    **dict.fromkeys(("--self-timed", "--no-self-timed"), _TRACE),
    **dict.fromkeys(("--plot-timeline", "--timeline-itl-thresholds", "--plot-dataset-stats"), _PLOTS),
    **dict.fromkeys(("--lora-modules", "--lora-assignment"), "a run asks for one: --served-model-name"),
    **dict.fromkeys(("--random-batch-size", "--no-reranker"), _EMBEDDINGS),
    "--use-beam-search": "beam search is not there",
    "--hf-name": "a row's columns say how it is read",
}


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `bench serve` and `bench throughput` share."""
    parser.add_argument("--dataset-path", help="a file, or with hf a name on the hub")
    parser.add_argument("--no-oversample", action="store_true", help="send no entry of a file twice")
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--input-len", type=int, help="of random and sonnet")
    parser.add_argument("--output-len", type=int, help="of all data sets")
    parser.add_argument("--random-input-len", type=int, default=1024)
    parser.add_argument("--random-output-len", type=int, default=128)
    parser.add_argument("--random-prefix-len", type=int, default=0, help="tokens that all prompts share")
    ratio = 'how far lengths are from the mean, both ways: 0.3, or \'{"input": 0.3, "output": 0.5}\''
    parser.add_argument("--random-range-ratio", default="0.0", help=ratio.replace("%", "%%"))
    parser.add_argument("--prefix-repetition-prefix-len", type=int, default=256)
    parser.add_argument("--prefix-repetition-suffix-len", type=int, default=256)
    parser.add_argument("--prefix-repetition-num-prefixes", type=int, default=10)
    parser.add_argument("--prefix-repetition-output-len", type=int, default=128)
    parser.add_argument("--hf-subset")
    parser.add_argument("--hf-split", help="default: train")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Names, meanings and defaults are vLLM's."""
    add = parser.add_argument
    add("--backend", default="openai", choices=["openai", "openai-chat", "vllm"])
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--base-url", help="http://HOST:PORT or https://, instead of --host and --port")
    add("--endpoint", help="default: /v1/completions, or with openai-chat /v1/chat/completions")
    add("--insecure", action="store_true", help="do not check the certificate of https")
    add("--header", nargs="*", metavar="KEY=VALUE", help="of each request")
    add("--api-key", default="")
    add("--model", help="default: the server's first")
    add("--served-model-name", help="its name in requests, where that is another")
    add("--tokenizer", help="folder, tokenizer.json or name on the hub; default: the server's /tokenize")
    add("--dataset-name", default="random", choices=DATASETS)
    add_dataset_flags(parser)
    add("--disable-shuffle", action="store_true", help="take a file's entries in their order")
    add("--skip-chat-template", action="store_true", help="custom: send prompts as they are")
    add("--chat-template-kwargs", type=_json_object, help="JSON, for that template")
    add("--sharegpt-output-len", type=int)
    add("--custom-output-len", type=int, default=256, help="-1: each entry's output_tokens")
    add("--hf-output-len", type=int)
    add("--no-stream", action="store_true", help="hf: download the data set whole")
    for name in ("sonnet_input_len", "sonnet_output_len", "sonnet_prefix_len"):
        add(f"--{name.replace('_', '-')}", type=int, default=OWN_LENGTHS[name])
    add("--vocab-size", type=int, default=32000, help="random ids are below this")
    add("--seed", type=int, default=0)
    add("--num-warmups", type=int, default=0, help="requests before those that are measured")
    add("--ready-check-timeout-sec", type=int, default=0, help="how long to wait for a first answer")
    add("--request-rate", type=float, default=math.inf, help="requests per second; inf: all at once")
    add("--burstiness", type=float, default=1.0, help="1: a Poisson process; below: in bursts; above: evenly")
    add("--ramp-up-strategy", choices=["linear", "exponential"])
    add("--ramp-up-start-rps", type=int)
    add("--ramp-up-end-rps", type=int)
    add("--max-concurrency", type=int)
    add("--ignore-eos", action="store_true", help="always so with random")
    for name in SAMPLING:
        add(f"--{name.replace('_', '-')}", type=int if name == "top_k" else float)
    add("--logprobs", type=int, help="how many to ask for, per token")
    add("--extra-body", type=_json_object, help="JSON object, in each request")
    add("--request-id-prefix", default=f"bench-{uuid.uuid4().hex[:8]}-")
    add("--profile", action="store_true", help="POST /start_profile and /stop_profile around it")
    add("--percentile-metrics", default="ttft,tpot,itl", help=", ".join(METRICS))
    add("--metric-percentiles", default="99", help="such as 50,90,99")
    add("--goodput", nargs="+", metavar="KEY:VALUE", help="milliseconds for ttft, tpot or e2el")
    add("--label", help="of the results")
    add("--metadata", nargs="*", metavar="KEY=VALUE", help="into the result")
    add("--save-result", action="store_true")
    add("--save-detailed", action="store_true", help="with what was measured of each request")
    add("--append-result", action="store_true", help="to the file, on a line of its own")
    add("--result-dir", default="")
    add("--result-filename")
    for flag in ("--trust-remote-code", "--disable-tqdm", "--skip-tokenizer-init"):  # neither code, bar nor tokenizer
        add(flag, action="store_true", help=argparse.SUPPRESS)
    add("--tokenizer-mode", choices=["auto", "hf"], help=argparse.SUPPRESS)
    vllm_flags.refuse(parser, ABSENT)


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def check(arguments: argparse.Namespace) -> None:
    arguments.endpoint = arguments.endpoint or ENDPOINTS.get(arguments.backend, "/v1/completions")
    at_least(1, arguments, "vocab_size", "max_concurrency", "sharegpt_output_len", "hf_output_len")
    at_least(1, arguments, "sonnet_input_len", "sonnet_output_len")
    at_least(0, arguments, "sonnet_prefix_len", "num_warmups", "ready_check_timeout_sec", "logprobs")
    for name in ("request_rate", "burstiness"):
        if not getattr(arguments, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be more than 0")
    _check_ramp_up(arguments)
    if is_chat(arguments) != (arguments.backend == "openai-chat"):
        raise UsageError(f"--endpoint {arguments.endpoint}: does not go with --backend {arguments.backend}")
    check_dataset(arguments)


def at_least(least: int, arguments: argparse.Namespace, *names: str) -> None:
    """UsageError names the flag that is less."""
    for name in names:
        if (value := getattr(arguments, name)) is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} {value}: at least {least}")


def check_dataset(arguments: argparse.Namespace) -> None:
    """Whether the data set has its file, and --input-len and --output-len in the place of its own flags."""
    at_least(1, arguments, "input_len", "output_len", "random_input_len", "random_output_len")
    at_least(1, arguments, *(f"prefix_repetition_{name}" for name in ("num_prefixes", "output_len", "suffix_len")))
    at_least(0, arguments, "random_prefix_len", "prefix_repetition_prefix_len")
    name = arguments.dataset_name
    if name != "custom":  # of which 0 is all
        at_least(1, arguments, "num_prompts")
    if name in ("random", "prefix_repetition") and arguments.dataset_path is not None:
        raise UsageError(f"--dataset-path {arguments.dataset_path}: --dataset-name {name} reads no file")
    if name not in ("random", "prefix_repetition") and not arguments.dataset_path:
        raise UsageError(f"--dataset-path: needed with --dataset-name {name}")
    if arguments.dataset_path and name != "hf":
        data.Reading(arguments.dataset_path, 0, 0).check()
    for general, own in (("input_len", ("random", "sonnet")), ("output_len", DATASETS)):
        if getattr(arguments, general) is not None:
            for one in own:
                setattr(arguments, f"{one}_{general}", getattr(arguments, general))


def _check_ramp_up(arguments: argparse.Namespace) -> None:
    start, end = arguments.ramp_up_start_rps, arguments.ramp_up_end_rps
    if arguments.ramp_up_strategy is None:
        return
    if arguments.request_rate != math.inf:
        raise UsageError("--ramp-up-strategy: not with --request-rate; the rate is what it changes")
    if start is None or end is None or not 0 < start <= end:
        raise UsageError("--ramp-up-strategy: needs --ramp-up-start-rps of at least 1 and --ramp-up-end-rps of no less")


def ratios(text: str) -> tuple[float, float]:
    """--random-range-ratio: of inputs and of outputs."""
    try:
        found = json.loads(text)
        both = (found["input"], found["output"]) if isinstance(found, dict) else (found, found)
        given = tuple(float(ratio) for ratio in both)
    except (ValueError, LookupError, TypeError):
        given = (-1.0, -1.0)
    if not all(0 <= ratio < 1 for ratio in given):
        raise UsageError(f'--random-range-ratio {text}: must be from 0 to below 1, or {{"input": 0.3, "output": 0.5}}')
    return given[0], given[1]


def random_lengths(arguments: argparse.Namespace) -> data.Lengths:
    lens = (arguments.random_input_len, arguments.random_output_len, arguments.random_prefix_len)
    return data.Lengths(*lens, *ratios(arguments.random_range_ratio))


def samples(
    arguments: argparse.Namespace, texts: data.Texts, vocab_size: int, seed: int, *, as_text: bool
) -> list[data.Sample]:
    """The requests of the data set that is asked for. as_text: for a chat, whose server has the template."""
    path, count, shuffle = arguments.dataset_path or "", arguments.num_prompts, not arguments.disable_shuffle
    reading = data.Reading(path, count, seed, shuffle, not arguments.no_oversample)
    match arguments.dataset_name:
        case "random":
            return data.random_ids(count, random_lengths(arguments), vocab_size, seed)
        case "prefix_repetition":
            suffix_len, prefix_len = arguments.prefix_repetition_suffix_len, arguments.prefix_repetition_prefix_len
            lengths = data.Lengths(suffix_len, arguments.prefix_repetition_output_len, prefix_len)
            return data.repeated_prefixes(count, arguments.prefix_repetition_num_prefixes, lengths, vocab_size, seed)
        case "sharegpt":
            return data.sharegpt(reading, texts.encode, arguments.sharegpt_output_len)
        case "sonnet":
            lens = (arguments.sonnet_input_len, arguments.sonnet_output_len, arguments.sonnet_prefix_len)
            return data.sonnet(reading, texts, data.Lengths(*lens), as_text)
        case "custom":
            length = None if arguments.custom_output_len == -1 else arguments.custom_output_len
            return data.custom(reading, texts, length, template=not (arguments.skip_chat_template or as_text))
        case _:
            rows = data.rows_of_hub(path, arguments.hf_subset, arguments.hf_split, not arguments.no_stream)
            rows = rows.shuffle(seed=seed) if shuffle else rows
            return data.hugging_face(reading, texts.encode, rows, arguments.hf_output_len)


def pairs(flag: str, words: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words or []:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{flag} {word}: must be KEY=VALUE")
        found[key.strip()] = value.strip()
    return found


def goodput(words: list[str] | None) -> dict[str, float]:
    """Milliseconds by metric."""
    found: dict[str, float] = {}
    for word in words or []:
        name, _, text = word.partition(":")
        limit = _number(text)
        if name not in ("ttft", "tpot", "e2el") or limit is None or not limit >= 0:
            raise UsageError(f"--goodput {word}: must be ttft, tpot or e2el, a colon and milliseconds, like ttft:200")
        found[name] = limit
    return found


def metrics(arguments: argparse.Namespace) -> tuple[list[str], list[float]]:
    """--percentile-metrics and --metric-percentiles."""
    wanted = arguments.percentile_metrics.split(",")
    if unknown := [name for name in wanted if name not in METRICS]:
        raise UsageError(f"--percentile-metrics: {unknown[0]!r} is none of {', '.join(METRICS)}")
    percents = [_number(text) for text in arguments.metric_percentiles.split(",")]
    if not all(percent is not None and 0 <= percent <= 100 for percent in percents):
        raise UsageError(f"--metric-percentiles {arguments.metric_percentiles}: numbers from 0 to 100, like 50,90,99")
    return wanted, [percent for percent in percents if percent is not None]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def body(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """The fields of every request beside its prompt and length."""
    found: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    found["ignore_eos"] = arguments.ignore_eos or arguments.dataset_name == "random"
    found |= {name: getattr(arguments, name) for name in SAMPLING if getattr(arguments, name) is not None}
    if arguments.logprobs is not None:
        chat = {"logprobs": True, "top_logprobs": arguments.logprobs}
        found |= chat if is_chat(arguments) else {"logprobs": arguments.logprobs}
    return {**found, **(arguments.extra_body or {})}


def is_chat(arguments: argparse.Namespace) -> bool:
    return "chat" in arguments.endpoint
