"""`meshlm bench serve`: load on a running OpenAI-style server, measured from the client."""

import argparse
import asyncio
import random
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from meshlm.supervisor.bench import data, metrics, results, serve_flags
from meshlm.supervisor.bench.arrivals import RampUp, delays
from meshlm.supervisor.bench.client import Target
from meshlm.supervisor.bench.data import Sample, Texts
from meshlm.supervisor.bench.metrics import Measured
from meshlm.supervisor.bench.texts import OwnTexts, ServerTexts
from meshlm.supervisor.cli.terminal import Server, model_of
from meshlm.supervisor.errors import StartError, UsageError

AGAIN_S = 1.0  # between tries until the server is ready


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser("serve", help="load on a running server")
    serve_flags.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    serve_flags.check(arguments)
    wanted, percents = serve_flags.metrics(arguments)
    goodput = serve_flags.goodput(arguments.goodput)
    metadata = serve_flags.pairs("--metadata", arguments.metadata)
    headers = serve_flags.pairs("--header", arguments.header)
    server = _server(arguments)
    model = arguments.model or _first_model(server, arguments)
    shown = arguments.served_model_name or model
    result = {**_settings(arguments, model), **metadata}
    file = _result_file(arguments, model, result["date"])
    if arguments.api_key:
        headers = {"Authorization": f"Bearer {arguments.api_key}", **headers}
    tls = _tls(arguments) if server.is_tls else None
    body = serve_flags.body(arguments, shown)
    is_chat = serve_flags.is_chat(arguments)
    target = Target(server.host, server.port, tls, server.base + arguments.endpoint, headers, body, is_chat)
    samples = _samples(arguments, server, shown)
    measured, duration = uvloop.run(_measure(arguments, server, target, samples))
    result |= metrics.summed_up(measured, duration, goodput)
    for name in wanted:
        result |= metrics.spread(measured, name, percents)
    metrics.show(result, wanted, percents)
    if file is not None:
        kept = {key: value for key, value in result.items() if arguments.save_detailed or key not in metrics.DETAILS}
        results.write(file, kept, append=arguments.append_result)
    return 0


def _server(arguments: argparse.Namespace) -> Server:
    if arguments.base_url is None:
        return Server(False, arguments.host, arguments.port, "", arguments.api_key)
    try:
        url = urlsplit(arguments.base_url)
        host, port = url.hostname, url.port
    except ValueError:
        host = None
    if not host or url.scheme not in ("http", "https") or url.query:
        raise UsageError(f"--base-url {arguments.base_url}: must be http://HOST:PORT or https://HOST:PORT")
    is_tls = url.scheme == "https"
    return Server(is_tls, host, port or (443 if is_tls else 80), url.path.rstrip("/"), arguments.api_key)


def _first_model(server: Server, arguments: argparse.Namespace) -> str:
    return model_of(server._replace(base=server.base + "/v1"), argparse.Namespace(model_name=None))


def _tls(arguments: argparse.Namespace) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if arguments.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _samples(arguments: argparse.Namespace, server: Server, model: str) -> list[Sample]:
    """The requests to send, from the data set that is asked for."""
    from_server = ServerTexts(server, model, arguments.chat_template_kwargs)
    texts: Texts = OwnTexts(arguments.tokenizer, from_server) if arguments.tokenizer else from_server
    is_chat, count, seed = serve_flags.is_chat(arguments), arguments.num_prompts, arguments.seed
    path, shuffle = arguments.dataset_path or "", not arguments.disable_shuffle
    reading = data.Reading(path, count, seed, shuffle, not arguments.no_oversample)
    match arguments.dataset_name:
        case "random":
            found = data.random_ids(count, serve_flags.random_lengths(arguments), arguments.vocab_size, seed)
        case "prefix_repetition":
            found = serve_flags.prefix_repetition(arguments, arguments.vocab_size, seed)
        case "sharegpt":
            found = data.sharegpt(reading, texts.encode, arguments.sharegpt_output_len)
        case "sonnet":
            lens = (arguments.sonnet_input_len, arguments.sonnet_output_len, arguments.sonnet_prefix_len)
            found = data.sonnet(reading, texts, data.Lengths(*lens), as_text=is_chat)
        case "custom":
            length = None if arguments.custom_output_len == -1 else arguments.custom_output_len
            template = not (arguments.skip_chat_template or is_chat)
            found = data.custom(reading, texts, length, template)
        case _:
            rows = data.rows_of_hub(path, arguments.hf_subset, arguments.hf_split, not arguments.no_stream)
            rows = rows.shuffle(seed=seed) if shuffle else rows
            found = data.hugging_face(reading, texts.encode, rows, arguments.hf_output_len)
    if not is_chat:
        return found
    return [s if isinstance(s.prompt, str) else s._replace(prompt=texts.decode(s.prompt)) for s in found]


async def _measure(
    arguments: argparse.Namespace, server: Server, target: Target, samples: list[Sample]
) -> tuple[list[Measured], float]:
    """Each sample's result, and how long they took together."""
    limit = asyncio.Semaphore(arguments.max_concurrency or len(samples) + arguments.num_warmups)
    first = samples[0]

    async def limited(sample: Sample, number: int | str) -> Measured:
        async with limit:
            return await target.measured(sample, f"{arguments.request_id_prefix}{number}")

    await _ready(arguments.ready_check_timeout_sec, target, first, arguments.request_id_prefix)
    await asyncio.gather(*(limited(first, f"warmup-{number}") for number in range(arguments.num_warmups)))
    ramp_up = None
    if arguments.ramp_up_strategy:
        ramp_up = RampUp(arguments.ramp_up_strategy, arguments.ramp_up_start_rps, arguments.ramp_up_end_rps)
    source = random.Random(arguments.seed)
    plan = delays(len(samples), arguments.request_rate, arguments.burstiness, ramp_up, source)
    if arguments.profile:
        await asyncio.to_thread(_profile, server, "start")
    begun, tasks = time.perf_counter(), []
    for number, (sample, delay) in enumerate(zip(samples, plan, strict=True)):
        if (wait := begun + delay - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(limited(sample, number)))
    found = await asyncio.gather(*tasks)
    duration = time.perf_counter() - begun
    if arguments.profile:
        await asyncio.to_thread(_profile, server, "stop")
    return found, duration


async def _ready(limit_s: float, target: Target, sample: Sample, prefix: str) -> None:
    """Wait until one request is answered. StartError when none is in time."""
    until = time.monotonic() + limit_s
    while limit_s > 0 and not (measured := await target.measured(sample, f"{prefix}ready")).ok:
        if time.monotonic() + AGAIN_S > until:
            raise StartError(f"--ready-check-timeout-sec {limit_s}: {' '.join(measured.error.split())}")
        await asyncio.sleep(AGAIN_S)


def _profile(server: Server, what: str) -> None:
    with server.request("POST", f"/{what}_profile"):
        pass


def _settings(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """The settings of the run that the result names."""
    rate = arguments.request_rate
    found = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label,
        "model_id": model,
        "tokenizer_id": arguments.tokenizer or model,
        "num_prompts": arguments.num_prompts,
        "request_rate": rate if rate < float("inf") else "inf",
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
    }
    if arguments.ramp_up_strategy:
        found |= {
            f"ramp_up_{name}": getattr(arguments, f"ramp_up_{name}") for name in ("strategy", "start_rps", "end_rps")
        }
    return found


def _result_file(arguments: argparse.Namespace, model: str, date: str) -> Path | None:
    """The path of the result, by vLLM's name for it, whose folder is there. UsageError when it cannot be made."""
    if not (arguments.save_result or arguments.append_result):
        return None
    label, rate = arguments.label or arguments.backend, f"{arguments.request_rate}qps"
    if arguments.ramp_up_strategy:
        rate = f"ramp-up-{arguments.ramp_up_strategy}-{arguments.ramp_up_start_rps}qps-{arguments.ramp_up_end_rps}qps"
    limit = "" if arguments.max_concurrency is None else f"-concurrency{arguments.max_concurrency}"
    name = arguments.result_filename or f"{label}-{rate}{limit}-{model.rpartition('/')[2]}-{date}.json"
    file = Path(arguments.result_dir) / name
    results.claim("--result-dir", file)
    return file
