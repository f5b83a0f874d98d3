"""`meshlm bench serve`: load on a running OpenAI-style server, measured from the client.

One asyncio program with bare HTTP/1.1 streams, so that the client costs as little as it can of the host it shares with the server.
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from meshlm.supervisor.bench.data import Sample, percentiles, random_ids
from meshlm.supervisor.errors import StartError, UsageError

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser("serve", help="load on a running server")
    parser.add_argument("--backend", default="openai", choices=["openai", "openai-chat", "vllm"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--base-url", help="http://HOST:PORT, instead of --host and --port")
    parser.add_argument("--endpoint", default="/v1/completions")
    parser.add_argument("--model", help="default: the server's first")
    parser.add_argument("--dataset-name", default="random", choices=["random"])
    parser.add_argument("--random-input-len", type=int, default=1024)
    parser.add_argument("--random-output-len", type=int, default=128)
    parser.add_argument("--random-range-ratio", type=float, default=0.0)
    parser.add_argument("--vocab-size", type=int, default=32000, help="random ids are below this")
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--num-warmups", type=int, default=0)
    parser.add_argument("--request-rate", type=float, default=float("inf"))
    parser.add_argument("--max-concurrency", type=int)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--percentile-metrics", default="ttft,tpot,itl")
    parser.add_argument("--metric-percentiles", default="99")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--save-result", action="store_true")
    parser.add_argument("--result-dir", default=".", help="with --save-result")
    parser.add_argument("--result-filename", help="with --save-result")
    for flag in ("--trust-remote-code", "--disable-tqdm"):  # as vllm bench has them: there is neither to be had
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", help=argparse.SUPPRESS)  # prompts are token ids
    parser.set_defaults(run=run)


@dataclass
class Measured:
    """One request, in seconds."""

    ok: bool = False
    error: str = ""
    prompt_len: int = 0
    output_len: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> int:
    if arguments.num_prompts < 1:
        raise UsageError("--num-prompts: at least 1")
    wanted = arguments.percentile_metrics.split(",")
    if unknown := [name for name in wanted if name not in METRICS]:
        raise UsageError(f"--percentile-metrics: {unknown[0]!r} is none of {', '.join(METRICS)}")
    if arguments.base_url:
        _set_address(arguments)
    uvloop.run(_run(arguments))
    return 0


def _set_address(arguments: argparse.Namespace) -> None:
    """--base-url as --host and --port."""
    url = urlsplit(arguments.base_url)
    if url.scheme != "http" or not url.hostname or url.path not in ("", "/"):
        raise UsageError(f"--base-url {arguments.base_url}: must be http://HOST:PORT")
    arguments.host, arguments.port = url.hostname, url.port or 80


async def _run(arguments: argparse.Namespace) -> None:
    model = arguments.model or await _first_model(arguments)
    total = arguments.num_prompts + arguments.num_warmups
    samples = random_ids(
        total,
        arguments.random_input_len,
        arguments.random_output_len,
        arguments.vocab_size,
        arguments.seed,
        arguments.random_range_ratio,
    )
    limit = asyncio.Semaphore(arguments.max_concurrency or total)
    warm, timed = samples[: arguments.num_warmups], samples[arguments.num_warmups :]
    await asyncio.gather(*(_limited(limit, arguments, model, sample) for sample in warm))
    begun = time.perf_counter()
    tasks = []
    source = random.Random(arguments.seed)
    for sample in timed:
        tasks.append(asyncio.create_task(_limited(limit, arguments, model, sample)))
        if arguments.request_rate != float("inf"):
            await asyncio.sleep(source.expovariate(arguments.request_rate))
    results = await asyncio.gather(*tasks)
    _report(arguments, results, time.perf_counter() - begun)


async def _limited(limit: asyncio.Semaphore, arguments: argparse.Namespace, model: str, sample: Sample) -> Measured:
    async with limit:
        try:
            return await _request(arguments, model, sample)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            return Measured(error=str(error) or type(error).__name__)


async def _exchange(
    arguments: argparse.Namespace, head: str, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(arguments.host, arguments.port, limit=1 << 20)
    key = f"Authorization: Bearer {arguments.api_key}\r\n" if arguments.api_key else ""
    writer.write(
        f"{head} HTTP/1.1\r\nHost: {arguments.host}\r\nContent-Type: application/json\r\n{key}"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return reader, writer


async def _first_model(arguments: argparse.Namespace) -> str:
    try:
        reader, writer = await _exchange(arguments, "GET /v1/models", b"")
        answer = await reader.read()
        writer.close()
        return str(json.loads(answer.partition(b"\r\n\r\n")[2])["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise StartError(f"no answer from {arguments.host}:{arguments.port}: {error}") from None


async def _request(arguments: argparse.Namespace, model: str, sample: Sample) -> Measured:
    body: dict[str, Any] = {
        "model": model,
        "prompt": sample.prompt,
        "max_tokens": sample.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": arguments.ignore_eos,
    }
    if arguments.temperature is not None:
        body["temperature"] = arguments.temperature
    if "chat" in arguments.endpoint:
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": str(sample.prompt)}]
    measured = Measured(prompt_len=sample.prompt_len)
    begun = last = time.perf_counter()
    reader, writer = await _exchange(arguments, f"POST {arguments.endpoint}", json.dumps(body).encode())
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError((await reader.read()).decode(errors="replace")[-300:])
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if event.get("usage"):
                measured.output_len = event["usage"]["completion_tokens"]
            if event.get("choices"):
                if not measured.ttft:
                    measured.ttft = now - begun
                else:
                    measured.itl.append(now - last)
                last = now
    finally:
        writer.close()
    measured.latency = last - begun
    measured.ok = True
    return measured


def _report(arguments: argparse.Namespace, results: list[Measured], duration: float) -> None:
    good = [result for result in results if result.ok]
    inputs, outputs = sum(r.prompt_len for r in good), sum(r.output_len for r in good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
    }
    values = {
        "ttft": [r.ttft for r in good],
        "tpot": [(r.latency - r.ttft) / (r.output_len - 1) for r in good if r.output_len > 1],
        "itl": [value for r in good for value in r.itl],
        "e2el": [r.latency for r in good],
    }
    wanted = [float(text) for text in arguments.metric_percentiles.split(",")]
    print(f"{' Serving Benchmark Result ':=^50}")
    for label, key in (
        ("Successful requests:", "completed"),
        ("Failed requests:", "failed"),
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Total Token throughput (tok/s):", "total_token_throughput"),
    ):
        shown = f"{result[key]:.2f}" if isinstance(result[key], float) else str(result[key])
        print(f"{label:<40} {shown:<10}")
    for name in arguments.percentile_metrics.split(","):
        data = [value * 1e3 for value in values[name]]
        result[f"mean_{name}_ms"] = sum(data) / max(1, len(data))
        found = percentiles(data, [50.0, *wanted])
        result[f"median_{name}_ms"] = found[50.0]
        print(f"Mean {METRICS[name]} (ms):{'':<20} {result[f'mean_{name}_ms']:.2f}")
        print(f"Median {METRICS[name]} (ms):{'':<18} {found[50.0]:.2f}")
        for percent in wanted:
            result[f"p{percent:g}_{name}_ms"] = found[percent]
            print(f"P{percent:g} {METRICS[name]} (ms):{'':<21} {found[percent]:.2f}")
    print("=" * 50)
    for error in {r.error for r in results if not r.ok}:
        print(f"failed: {error}")
    if arguments.save_result:
        path = Path(arguments.result_dir) / (
            arguments.result_filename or f"meshlm-bench-{time.strftime('%Y%m%d-%H%M%S')}.json"
        )
        path.write_text(json.dumps(result, indent=1))
