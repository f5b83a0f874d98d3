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
import sys
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
from attacks import ATTACKS, KILLS, LETS_NOTHING_IN
from harness import KeptStream, Mesh, milliseconds

ANSWER_LIMIT_S = 60.0
SAMPLE_S = 0.25


class Honest:
    """Clients that send the same requests again and again."""

    def __init__(self, port: int, streams: int, num_tokens: int) -> None:
        body = {"max_tokens": num_tokens, "temperature": 0}
        self._bodies = [{"prompt": f"Tell me a story of number {number}.", **body} for number in range(streams)]
        self._port = port
        self.texts: list[str | None] = []

    async def _one(self, body: dict[str, Any]) -> KeptStream:
        try:
            stream = await KeptStream.begin(self._port, body)
            await asyncio.wait_for(stream.done, ANSWER_LIMIT_S)
        except (OSError, TimeoutError):
            return KeptStream(body)  # it has no text
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
        found: list[tuple[KeptStream, str | None]] = []

        async def client(body: dict[str, Any], text: str | None) -> None:
            while time.perf_counter() < until:
                found.append((await self._one(body), text))

        await asyncio.gather(*(client(*pair) for pair in zip(self._bodies, self.texts, strict=True)))
        return self._report(found)

    def _report(self, found: list[tuple[KeptStream, str | None]]) -> dict[str, Any]:
        gaps = [b - a for stream, _ in found for a, b in pairwise(stream.times)]
        texts = [(stream.text, expected) for stream, expected in found]
        return {
            "streams": len(found),
            "failed": sum(text is None for text, _ in texts),
            "wrong": sum(text is not None and text != expected for text, expected in texts),
            "itl_ms": milliseconds(gaps) or {"p50": 0.0, "p99": 0.0, "max": 0.0},
        }


async def largest(mesh: Mesh, over: asyncio.Event) -> dict[str, float]:
    """Resident MiB by process, the most that was seen."""
    found: dict[str, float] = {}
    while not over.is_set():
        for name, mib in (await asyncio.to_thread(mesh.rss_mib)).items():
            found[name] = max(found.get(name, 0.0), mib)
        await asyncio.sleep(SAMPLE_S)
    return found


def context_of(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
        return int(json.load(answer)["data"][0]["max_model_len"])


async def attacked(name: str, mesh: Mesh, arguments: argparse.Namespace) -> dict[str, Any]:
    max_model_len = await asyncio.to_thread(context_of, mesh.port)
    honest = Honest(mesh.port, arguments.streams, arguments.tokens)
    alone, pids, rss = await honest.alone(), mesh.pids(), mesh.rss_mib()
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
    replaced = [name for name, pid in mesh.pids().items() if pids.get(name) != pid]
    slower = round(beside["itl_ms"]["p99"] / max(alone["itl_ms"]["p99"], 0.01), 2)
    answered = json.loads(answers or b"{}")
    is_let_in = name in LETS_NOTHING_IN and any(status.startswith("2") for status in answered)
    is_harmed = any(run["failed"] or run["wrong"] for run in (beside, after)) or (replaced and name not in KILLS)
    return {
        "attack": name,
        "alone": alone,
        "beside": beside,
        "after": after,
        "itl_p99_slower": slower,
        "attacker_was_answered": answered,
        "replaced": replaced,
        "rss_mib_before": rss,
        "rss_mib_most": await memory,
        "kept": not is_let_in and not is_harmed and slower <= arguments.within,
    }


def buggy_mesh(flags: list[str]) -> Mesh:
    """A mesh whose processes die of certain prompts."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "mesh" / "support"))
    from poison_plugin import install

    folder, before = tempfile.mkdtemp(), os.environ.get("PYTHONPATH", "")
    atexit.register(shutil.rmtree, folder)  # processes that are started again read it too
    return Mesh(flags, PYTHONPATH=os.pathsep.join(filter(None, [str(install(Path(folder))), before])))


def main(words: list[str] | None = None) -> None:
    """`words` of the command line; None: all."""
    parser = harness.parser(__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100, help="output tokens of a stream")
    parser.add_argument("--device", default="fake")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the fake device")
    parser.add_argument("--vocab-size", type=int, default=49_152, help="of the model: the default one's")
    parser.add_argument("--within", type=float, default=3.0)
    arguments = parser.parse_args(words)
    if unknown := set(arguments.attacks) - ATTACKS.keys():
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    flags = ["--device", arguments.device]
    flags += ["--fake-step-ms", str(arguments.step_ms)] if arguments.device == "fake" else []
    found = []
    for name in arguments.attacks or ATTACKS:
        with Mesh(flags) if name not in KILLS else buggy_mesh(flags) as mesh:
            found.append(asyncio.run(attacked(name, mesh, arguments)))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    harness.keep(arguments.json, {"attacks": found})
    for result in found:
        kept = "kept" if result["kept"] else "NOT KEPT"
        print(result["attack"], f"ITL p99 x {result['itl_p99_slower']}", kept, sep="\t")
    sys.exit(not all(result["kept"] for result in found))


if __name__ == "__main__":
    main()
