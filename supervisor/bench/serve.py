"""`meshlm bench serve`: load on a running OpenAI-style server, measured from the client.

Requests are bare HTTP/1.1 streams, so that the client costs as little as it can of the host it shares with the server. They are sent as
a Poisson process, in bursts or evenly (gamma distribution), or faster and faster.
"""

import argparse
import asyncio
import json
import math
import random
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from meshlm.supervisor.bench import drafts, results, serve_flags
from meshlm.supervisor.bench.data import OwnTexts, Sample, ServerTexts, Texts
from meshlm.supervisor.bench.results import Measured
from meshlm.supervisor.cli.terminal import Server, model_of
from meshlm.supervisor.errors import StartError, UsageError

LONGEST_EVENT = 1 << 24


class Target(NamedTuple):
    """The server, and what every request to it says."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    endpoint: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]  # beside prompt and length
    is_chat: bool

    async def measured(self, sample: Sample, request_id: str) -> Measured:
        measured = Measured(start=time.perf_counter(), prompt_len=sample.prompt_len)
        try:
            await self._send(sample, request_id, measured)
        except (OSError, asyncio.IncompleteReadError, ValueError, LookupError, TypeError) as error:
            measured.error = str(error) or type(error).__name__
        return measured

    async def _send(self, sample: Sample, request_id: str, measured: Measured) -> None:
        given: Any = [{"role": "user", "content": sample.prompt}] if self.is_chat else sample.prompt
        body = {("messages" if self.is_chat else "prompt"): given, "max_tokens": sample.output_len, **self.body}
        data = json.dumps(body).encode()
        last = measured.start
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=LONGEST_EVENT, ssl=self.tls)
        try:
            own = {"Host": self.host, "Content-Type": "application/json", "X-Request-Id": request_id}
            headers = {**own, **self.headers}
            lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
            head = f"POST {self.endpoint} HTTP/1.1\r\n{''.join(lines)}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            if b" 200 " not in await reader.readline():
                raise ValueError(_message((await reader.read()).partition(b"\r\n\r\n")[2]))
            texts = []
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(_message(line[6:]))
                if event.get("usage"):
                    measured.output_len = event["usage"]["completion_tokens"]
                for choice in event.get("choices") or []:
                    texts.append((choice["delta"].get("content") if self.is_chat else choice["text"]) or "")
                    if not measured.ttft:
                        measured.ttft = now - measured.start
                    else:
                        measured.itl.append(now - last)
                    last = now
        finally:
            writer.close()
        if not measured.ttft:
            raise ValueError("the answer has no event with a choice")
        measured.output_len = measured.output_len or len(measured.itl) + 1  # a server without usage: a token an event
        measured.text, measured.latency = "".join(texts), last - measured.start
        measured.ok = True


def _message(body: bytes) -> str:
    """The server's words for what is wrong; its answer may have a chunk's size before it."""
    begin, end = body.find(b"{"), body.rfind(b"}")
    try:
        return str(json.loads(body[begin : end + 1])["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[-300:]


INFINITE = math.inf


class RampUp(NamedTuple):
    """A rate of requests per second that grows from one value to another."""

    strategy: str  # linear or exponential
    start: float
    end: float

    def rate(self, progress: float) -> float:
        """`progress` from 0 to 1."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return float(self.start * (self.end / self.start) ** progress)


def delays(count: int, rate: float, burstiness: float, ramp_up: RampUp | None, source: random.Random) -> list[float]:
    """Seconds from the start to each request. Without ramp_up they are stretched, so that the last one comes at count / rate."""
    total, found = 0.0, []
    for number in range(count):
        now = ramp_up.rate(number / max(1, count - 1)) if ramp_up else rate
        if now < INFINITE:
            even = burstiness == INFINITE
            total += 1 / now if even else source.gammavariate(burstiness, 1 / (now * burstiness))
        found.append(total)
    if ramp_up is None and total > 0:
        found = [delay * count / rate / total for delay in found]
    return found


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
    first = argparse.Namespace(model_name=None)
    model = arguments.model or model_of(server._replace(base=server.base + "/v1"), first)
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
    measured, duration, drafted = uvloop.run(_measure(arguments, server, target, samples))
    result |= results.summed_up(measured, duration, goodput) | drafted
    for name in wanted:
        result |= results.spread(measured, name, percents)
    results.show(result, wanted, percents)
    kept = {key: value for key, value in result.items() if arguments.save_detailed or key not in results.DETAILS}
    results.write(file, kept, append=arguments.append_result)
    return 0


def _server(arguments: argparse.Namespace) -> Server:
    if arguments.base_url is None:
        return Server(False, arguments.host, arguments.port, "", arguments.api_key)
    try:
        return Server.of(arguments.base_url, arguments.api_key)
    except ValueError:
        raise UsageError(f"--base-url {arguments.base_url}: must be http://HOST:PORT or https://HOST:PORT") from None


def _tls(arguments: argparse.Namespace) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if arguments.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _samples(arguments: argparse.Namespace, server: Server, model: str) -> list[Sample]:
    """The requests to send, from the data set that is asked for."""
    from_server = ServerTexts(server, model, arguments.chat_template_kwargs)
    texts: Texts = OwnTexts(arguments.tokenizer, from_server) if arguments.tokenizer else from_server
    is_chat = serve_flags.is_chat(arguments)
    found = serve_flags.samples(arguments, texts, arguments.vocab_size, arguments.seed, as_text=is_chat)
    if not is_chat:
        return found
    return [s if isinstance(s.prompt, str) else s._replace(prompt=texts.decode(s.prompt)) for s in found]


async def _measure(
    arguments: argparse.Namespace, server: Server, target: Target, samples: list[Sample]
) -> tuple[list[Measured], float, dict[str, Any]]:
    """Each sample's result, how long they took together, and what the server counted of drafts meanwhile."""
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
    before = await asyncio.to_thread(drafts.counted, server)
    begun, tasks = time.perf_counter(), []
    for number, (sample, delay) in enumerate(zip(samples, plan, strict=True)):
        if (wait := begun + delay - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(limited(sample, number)))
    found = await asyncio.gather(*tasks)
    duration = time.perf_counter() - begun
    if arguments.profile:
        await asyncio.to_thread(_profile, server, "stop")
    drafted = drafts.summed_up(before, await asyncio.to_thread(drafts.counted, server))
    return found, duration, drafted


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
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        found |= {name: getattr(arguments, name) for name in names}
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
