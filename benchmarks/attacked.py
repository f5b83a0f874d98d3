"""Honest streams beside each attack of attacks.py: their time between tokens, and whether their text is what it is without the attack.

    python -P benchmarks/overload.py --attacks [ATTACK ...] [--seconds 15] [--streams 4] [--device fake|cpu] [--json FILE]

Each attack meets a mesh of its own. First the streams run alone, for the text and the pace; then for --seconds beside the attack, and
once more when it is over. Reported: inter-token latency (ITL) alone and beside, texts that differ, answers other than 200, what the
attacker was answered, processes that were replaced, the largest resident memory. Exit code 1 when a text was wrong, a stream failed, a
process died, or the ITL's 99th percentile was above --within times that of the streams alone.

Attacker, clients and mesh share the machine's processors: with two of them an attack also takes time that a server would have.
"""

import argparse
import asyncio
import atexit
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from attacks import ATTACKS, KILLS, LETS_NOTHING_IN
from control_plane import machine
from live_mesh import Mesh

ANSWER_LIMIT_S = 60.0
SAMPLE_S = 0.25


class Stream(asyncio.Protocol):
    """One streaming completion: its text, and when its events came."""

    def __init__(self, body: bytes) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.times: list[float] = []
        self._body, self._data = body, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        transport.write(head % len(self._body) + self._body)

    def data_received(self, data: bytes) -> None:
        self.times += [time.perf_counter()] * data.count(b"data: {")
        self._data += data

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    @property
    def text(self) -> str | None:
        """None of a stream that failed or broke."""
        if self._data[9:12] != b"200" or b"data: [DONE]" not in self._data:
            return None
        events = [line[6:] for line in self._data.split(b"\n") if line.startswith(b"data: {")]
        choices = [json.loads(event).get("choices") for event in events]
        return "".join(choice[0]["text"] for choice in choices) if all(choices) else None


class Honest:
    """Clients that ask for the same texts again and again."""

    def __init__(self, port: int, streams: int, num_tokens: int) -> None:
        prompts = [f"Tell me a story of number {number}." for number in range(streams)]
        body = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        self._bodies = [json.dumps({"prompt": prompt, **body}).encode() for prompt in prompts]
        self._port = port
        self.texts: list[str | None] = []

    async def _one(self, body: bytes) -> Stream:
        stream = Stream(body)
        try:
            await asyncio.get_running_loop().create_connection(lambda: stream, "127.0.0.1", self._port)
            await asyncio.wait_for(stream.done, ANSWER_LIMIT_S)
        except (OSError, TimeoutError):
            pass  # it has no text then
        return stream

    async def alone(self) -> dict[str, Any]:
        """Three rounds, the last two of which count."""
        await asyncio.gather(*map(self._one, self._bodies))
        rounds = [await asyncio.gather(*map(self._one, self._bodies)) for _ in range(2)]
        self.texts = [stream.text for stream in rounds[0]]
        return self._report([(stream, text) for one in rounds for stream, text in zip(one, self.texts, strict=True)])

    async def beside(self, seconds: float) -> dict[str, Any]:
        """Each client one stream after the other, for so long."""
        until = time.perf_counter() + seconds
        found: list[tuple[Stream, str | None]] = []

        async def client(body: bytes, text: str | None) -> None:
            while time.perf_counter() < until:
                found.append((await self._one(body), text))

        await asyncio.gather(*(client(*pair) for pair in zip(self._bodies, self.texts, strict=True)))
        return self._report(found)

    def _report(self, found: list[tuple[Stream, str | None]]) -> dict[str, Any]:
        gaps = [b - a for stream, _ in found for a, b in pairwise(stream.times)]
        cuts = statistics.quantiles(gaps, n=100, method="inclusive") if len(gaps) > 1 else [0.0] * 99
        return {
            "streams": len(found),
            "failed": sum(stream.text is None for stream, _ in found),
            "wrong": sum(stream.text is not None and stream.text != text for stream, text in found),
            "itl_ms": {"p50": round(1e3 * cuts[49], 2), "p99": round(1e3 * cuts[98], 2), "max": milliseconds(gaps)},
        }


def milliseconds(gaps: list[float]) -> float:
    return round(1e3 * max(gaps, default=0.0), 1)


async def largest(mesh: Mesh, over: asyncio.Event) -> dict[str, float]:
    """Resident MiB by process, the most that was seen."""
    found: dict[str, float] = {}
    while not over.is_set():
        for place in await mesh.places():
            found[place.name] = max(found.get(place.name, 0.0), round(place.rss_bytes / 2**20, 1))
        await asyncio.sleep(SAMPLE_S)
    return found


def context_of(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
        return int(json.load(answer)["data"][0]["max_model_len"])


async def attacked(name: str, mesh: Mesh, arguments: argparse.Namespace) -> dict[str, Any]:
    max_model_len = await asyncio.to_thread(context_of, mesh.port)
    honest = Honest(mesh.port, arguments.streams, arguments.tokens)
    alone, before = await honest.alone(), await mesh.places()
    over = asyncio.Event()
    memory = asyncio.ensure_future(largest(mesh, over))
    given = (name, str(mesh.port), str(arguments.vocab_size), str(max_model_len), str(arguments.seconds))
    script = str(Path(__file__).with_name("attacks.py"))
    attacker = await asyncio.create_subprocess_exec(
        sys.executable, "-P", script, *given, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    beside = await honest.beside(arguments.seconds)
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            answers, _ = await attacker.communicate()
    except TimeoutError:
        attacker.kill()
        answers = b'{"it did not end": 1}'
    after = await honest.beside(1.0)
    over.set()
    pids = {place.name: place.pid for place in before}
    rss = {place.name: round(place.rss_bytes / 2**20, 1) for place in before}
    replaced = [place.name for place in await mesh.places() if pids.get(place.name) != place.pid]
    slower = round(beside["itl_ms"]["p99"] / max(alone["itl_ms"]["p99"], 0.01), 2)
    most = await memory
    answered = json.loads(answers or b"{}")
    is_let_in = name in LETS_NOTHING_IN and any(status.startswith("2") for status in answered)
    return {
        "attack": name,
        "alone": alone,
        "beside": beside,
        "after": after,
        "itl_p99_slower": slower,
        "attacker_was_answered": answered,
        "replaced": replaced,
        "rss_mib_before": rss,
        "rss_mib_most": most,
        "kept": not (
            (replaced and name not in KILLS)
            or is_let_in
            or any(part["failed"] or part["wrong"] for part in (beside, after))
        )
        and slower <= arguments.within,
    }


def buggy_mesh(flags: list[str]) -> Mesh:
    """A mesh whose processes die of certain prompts."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "mesh" / "support"))
    from poison_plugin import install

    folder, before = tempfile.mkdtemp(), os.environ.get("PYTHONPATH", "")
    atexit.register(shutil.rmtree, folder)  # processes that are started again read it too
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(install(Path(folder))), before]))
    mesh = Mesh(flags)
    os.environ["PYTHONPATH"] = before
    return mesh


def main(words: list[str] | None = None) -> None:
    """`words` of the command line; None: all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100, help="output tokens of a stream")
    parser.add_argument("--device", default="fake")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the fake device")
    parser.add_argument("--vocab-size", type=int, default=49_152, help="of the model: the default one's")
    parser.add_argument("--within", type=float, default=3.0)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args(words)
    if unknown := set(arguments.attacks) - ATTACKS.keys():
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    flags = ["--device", arguments.device, "--disable-log-requests"]
    flags += ["--fake-step-ms", str(arguments.step_ms)] if arguments.device == "fake" else []
    load_before, found = os.getloadavg()[0], []
    for name in arguments.attacks or ATTACKS:
        mesh = Mesh(flags) if name not in KILLS else buggy_mesh(flags)
        try:
            mesh.wait_ready()
            found.append(asyncio.run(attacked(name, mesh, arguments)))
        finally:
            mesh.stop()
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    given = {name: value for name, value in vars(arguments).items() if name not in ("json", "attacks")}
    where = {**machine(), "load_average_before": round(load_before, 1)}
    record = {"benchmark": "attacked", "machine": where, "arguments": given, "attacks": found}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    for result in found:
        parts = (result["attack"], f"ITL p99 x {result['itl_p99_slower']}", "kept" if result["kept"] else "NOT KEPT")
        print(*parts, sep="\t")
    sys.exit(not all(result["kept"] for result in found))


if __name__ == "__main__":
    main()
