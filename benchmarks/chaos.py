"""Kills processes of a running mesh, one after the other, and compares every stream with the undisturbed run.

    python -P benchmarks/chaos.py --minutes 10 --json FILE [--device cpu|cuda|fake] [--streams 64] [--roles worker scheduler ...]
        [--frontends 2] [--detokenizers 2] [any other flag of `meshlm serve`]

First all requests of the mix are answered undisturbed: the reference. Then `--streams` clients ask for them again and again, while a
random process is killed with SIGKILL as soon as most streams flow again after the last fault, at times
before that (the supervisor only while it has a standby); now and then one is stopped by SIGSTOP instead, for a moment or until the
supervisor judges it stuck. A pause is the longest gap between two tokens of any stream around a fault. Exit code 1 when anything was
lost, duplicated, wrong or failed, or when pages of a KV cache or of the store are still in use once all streams have ended and every
lease is over.
On a GPU tokens depend on what else is in their step, as far as 16 bits can tell: there they are counted, and `as_undisturbed` says
how many stand before the first of their stream that differs from the reference.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
from harness import Mesh, Process
from streams import READ_LIMIT_S, Answer, Ask, Gap, Stream, counted, draw_asks, num_equal, verdict

ROLES = ("worker", "scheduler", "detokenizer", "coordinator", "frontend", "store", "supervisor")
# How often each role is hit. On a CPU all streams are computed again after the death of a worker or its scheduler, which takes
# many seconds: equal shares would leave no time for tokens.
WEIGHTS = {
    "cpu": {
        "worker": 1,
        "scheduler": 1,
        "detokenizer": 3,
        "coordinator": 3,
        "frontend": 3,
        "store": 2,
        "supervisor": 2,
    },
    **dict.fromkeys(("cuda", "fake"), dict.fromkeys(ROLES, 1)),
}
TOO_EARLY_SHARE = 0.15  # of the kills do not wait for the mesh to heal
SHORT_STOP_S = (0.5, 3.0)
NOTICE_S = 0.05  # what is on its way when a process dies still arrives
KEPT_FAILURES = 20
LEASES_S = 45.0  # by then all leases on pages have ended, those of readers that died too


@dataclass
class Fault:
    """One kill or stop. Times are of time.monotonic()."""

    kind: str  # kill, stop, stuck
    process: str
    at: float
    replaced_s: float = 0.0  # until another process has its victim (ready)
    healed_s: float = 0.0  # until most streams flowed again
    pause_s: float = 0.0
    alone: bool = True  # no other fault in its pause

    @property
    def role(self) -> str:
        return self.process.partition("/")[0]


class Chaos:
    """The clients, and what is done to the mesh meanwhile."""

    def __init__(self, mesh: Mesh, asks: list[Ask], arguments: argparse.Namespace) -> None:
        self.mesh, self.asks, self.arguments = mesh, asks, arguments
        self.dice = random.Random(arguments.seed)
        self.reference: dict[int, Answer] = {}
        self.running: set[Stream] = set()
        self.faults: list[Fault] = []
        self.verdicts: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.gaps: list[Gap] = []
        self.tokens = self.equal = self.retries = self.refusals = 0
        self.undisturbed_gap_s = 0.0
        self.ending = False
        self.seconds = 0.0
        self.clients: list[asyncio.Task[None]] = []

    # --- clients ---

    async def learn_reference(self) -> None:
        """All requests at once, as later. SystemExit when even that does not work."""
        streams = [Stream(self.mesh.port, ask) for ask in self.asks]
        answers = await asyncio.gather(*(stream.run() for stream in streams))
        for ask, answer in zip(self.asks, answers, strict=True):
            if answer.error or answer.finish_reason is None:
                raise SystemExit(f"the undisturbed run failed: {ask.body} gave {answer}")
            self.reference[ask.number] = answer
        self.undisturbed_gap_s = max(stream.longest_s for stream in streams)

    async def client(self, number: int) -> None:
        """One request after the other until the end."""
        dice = random.Random(f"{self.arguments.seed}/{number}")
        while not self.ending:
            stream = Stream(self.mesh.port, dice.choice(self.asks))
            self.running.add(stream)
            answer = await stream.run()
            self.running.discard(stream)
            self._judge(stream, answer)

    def _judge(self, stream: Stream, answer: Answer) -> None:
        wanted = self.reference[stream.ask.number]
        found = (counted if self.arguments.device == "cuda" else verdict)(answer, wanted)
        self.equal += num_equal(answer.token_ids, wanted.token_ids)
        self.verdicts[found] += 1
        self.tokens += len(answer.token_ids)
        self.retries += stream.retries
        self.refusals += stream.refusals
        self.gaps += stream.gaps
        if found != "right":
            at = next((i for i, (a, b) in enumerate(zip(answer.token_ids, wanted.token_ids)) if a != b), None)
            failure: dict[str, Any] = {
                "verdict": found,
                "ask": stream.ask.body,
                "got": answer,
                "wanted": wanted,
                "differs_at": at,
            }
            failure |= {"retries": stream.retries, "ended_at": time.monotonic()}
            print(f"{found}: request {stream.ask.number} {answer.error}", file=sys.stderr)
            if len(self.failures) < KEPT_FAILURES:
                self.failures.append(failure)

    # --- faults ---

    async def torment(self, until: float) -> None:
        """One fault after the other."""
        told = time.monotonic()
        script = [entry.split(":") for entry in self.arguments.script]
        while script or (not self.arguments.script and time.monotonic() < until):
            kind, role = script[0] if script else (self._kind(), "")
            if await self._one_fault(kind, role):
                script = script[1:]
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(f"{until - told:5.0f} s left, {len(self.faults)} faults, {dict(self.verdicts)}", file=sys.stderr)
            for client in self.clients:
                if client.done():
                    client.result()  # it never ends by itself but by an error of this program
            if await asyncio.to_thread(self.mesh.has_ended):
                raise SystemExit("the mesh ended:\n" + "\n".join(self.mesh.lines[-20:]))

    async def _one_fault(self, kind: str, role: str) -> bool:
        """To a process of this role, "" for any; False when none is there."""
        processes = [
            victim
            for victim in await asyncio.to_thread(self.mesh.victims)
            if victim.pid and victim.role in self.arguments.roles
        ]
        present = sorted({victim.role for victim in processes if role in ("", victim.role)})
        if not present:
            await asyncio.sleep(0.05)
            return False
        role = self.dice.choices(present, [WEIGHTS[self.arguments.device][name] for name in present])[0]
        victim = self.dice.choice([victim for victim in processes if victim.role == role])
        kind = "kill" if role == "supervisor" else kind  # nobody watches whether it hangs
        fault = Fault(kind, victim.name, time.monotonic())
        self.faults.append(fault)
        with contextlib.suppress(ProcessLookupError):
            if kind == "kill":
                os.kill(victim.pid, signal.SIGKILL)
            else:
                await self._stop(victim, fault)
        await self._heal(victim, fault)
        await asyncio.sleep(self.dice.random() * self.arguments.spread_s)
        return True

    def _kind(self) -> str:
        """By --stuck-share and --stop-share."""
        draw = self.dice.random()
        if draw < self.arguments.stuck_share:
            return "stuck"
        return "stop" if draw < self.arguments.stuck_share + self.arguments.stop_share else "kill"

    async def _stop(self, victim: Process, fault: Fault) -> None:
        """SIGSTOP for a moment, or until the supervisor has replaced the process."""
        os.kill(victim.pid, signal.SIGSTOP)
        if fault.kind == "stop":
            await asyncio.sleep(self.dice.uniform(*SHORT_STOP_S))
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGCONT)
            return
        while victim.pid in [other.pid for other in await asyncio.to_thread(self.mesh.status)]:
            await asyncio.sleep(0.05)
            if time.monotonic() - fault.at > 4 * self.arguments.stall_timeout + 10:
                self.verdicts["error"] += 1
                print(f"{victim.name} was stopped and never replaced", file=sys.stderr)
                os.kill(victim.pid, signal.SIGCONT)
                return

    async def _heal(self, victim: Process, fault: Fault) -> None:
        """Wait until most streams have had a token since (or do not, where it should hit the mesh while it heals)."""
        hasty = self.dice.random() < TOO_EARLY_SHARE and not self.arguments.script
        limit = time.monotonic() + (self.dice.random() if hasty else self.arguments.heal_limit_s)
        while time.monotonic() < limit:
            flowing = sum(stream.last_at > fault.at + NOTICE_S for stream in self.running)
            if not fault.healed_s and flowing >= self.arguments.healed_share * len(self.running):
                fault.healed_s = time.monotonic() - fault.at
            if not fault.replaced_s and await self._replaced(victim, fault):
                fault.replaced_s = time.monotonic() - fault.at
            if fault.healed_s and fault.replaced_s:
                return
            await asyncio.sleep(0.03)

    async def _replaced(self, victim: Process, fault: Fault) -> bool:
        for other in await asyncio.to_thread(self.mesh.status):
            if other.name == victim.name:
                return other.state == "ready" and (other.pid != victim.pid) == (fault.kind != "stop")
        return False

    # --- the end ---

    async def run(self) -> None:
        begun = time.monotonic()
        self.clients = [asyncio.create_task(self.client(number)) for number in range(self.arguments.streams)]
        await self.torment(begun + 60 * self.arguments.minutes)
        self.ending = True
        done, late = await asyncio.wait(self.clients, timeout=2 * READ_LIMIT_S)
        for task in late:
            task.cancel()
        self.verdicts["lost"] += len(late)
        for task in done:
            task.result()
        self.seconds = time.monotonic() - begun

    def attribute(self) -> None:
        """Each fault's pause: the longest gap that spans its time. A gap with another fault in it is nobody's alone."""
        times = sorted(fault.at for fault in self.faults)
        for fault in self.faults:
            for gap in self.gaps:
                if gap.begin <= fault.at + NOTICE_S < gap.end:
                    fault.pause_s = max(fault.pause_s, gap.end - gap.begin)
                    others = sum(gap.begin < at < gap.end for at in times) - (gap.begin < fault.at < gap.end)
                    fault.alone = fault.alone and not others

    def report(self) -> dict[str, Any]:
        self.attribute()
        kills = [fault for fault in self.faults if fault.kind == "kill"]
        return {
            "seconds": round(self.seconds, 1),
            "kills": {role: sum(fault.role == role for fault in kills) for role in self.arguments.roles},
            "num_kills": len(kills),
            "num_stops": sum(fault.kind == "stop" for fault in self.faults),
            "num_stuck": sum(fault.kind == "stuck" for fault in self.faults),
            "streams": self.verdicts.total(),
            "right": self.verdicts["right"],
            "lost": self.verdicts["lost"],
            "duplicated": self.verdicts["duplicated"],
            "wrong": self.verdicts["wrong"],
            "errors": self.verdicts["error"],
            "retries": self.retries,
            "refusals_503": self.refusals,
            "tokens": self.tokens,
            "as_undisturbed": round(self.equal / max(1, self.tokens), 4),
            "undisturbed_gap_s": round(self.undisturbed_gap_s, 3),
            "pause_s": {role: pauses([f for f in kills if f.role == role]) for role in self.arguments.roles},
            "pause_of_stops_s": pauses([fault for fault in self.faults if fault.kind == "stop"]),
            "stuck_replaced_s": spread([fault.replaced_s for fault in self.faults if fault.kind == "stuck"]),
            "failures": self.failures,
        }


def pauses(faults: list[Fault]) -> dict[str, Any]:
    """The pauses of the faults that had one for themselves (0: no gap as long as 0.04 s); `longest_mixed` is of all faults."""
    alone = [fault.pause_s for fault in faults if fault.alone]
    mixed = max((fault.pause_s for fault in faults), default=0.0)
    return {**spread(alone), "longest_mixed": round(mixed, 3)}


def spread(values: list[float]) -> dict[str, Any]:
    if not values:
        return {"count": 0}
    return {"count": len(values), "median": round(statistics.median(values), 3), "longest": round(max(values), 3)}


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = harness.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--device", choices=["cpu", "cuda", "fake"], default="cpu")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES), help="whose processes may die")
    parser.add_argument("--tokens", type=int, nargs=2, default=[16, 64], help="shortest and longest answer")
    parser.add_argument(
        "--longer", type=int, default=0, help="tokens of a prompt beyond a few (--dp-roles hands off long ones)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--healed-share",
        type=float,
        default=0.5,
        help="of the streams, that must have had a token before the next fault",
    )
    parser.add_argument("--heal-limit-s", type=float, default=15.0, help="then the next fault comes anyway")
    parser.add_argument("--spread-s", type=float, default=0.5, help="random rest between healed and the next fault")
    parser.add_argument("--stop-share", type=float, default=0.06, help="of faults: SIGSTOP, then SIGCONT")
    parser.add_argument("--stuck-share", type=float, default=0.02, help="of faults: SIGSTOP until it is replaced")
    parser.add_argument("--stall-timeout", type=float, default=5.0, help="given to the mesh")
    parser.add_argument(
        "--script", nargs="+", default=[], metavar="KIND:ROLE", help="these faults (kill, stop, stuck), then the end"
    )
    parser.add_argument("--keep-logs", type=Path, help="file for what the mesh said")
    return parser.parse_known_args(argv)


def serve_flags(arguments: argparse.Namespace, rest: list[str]) -> list[str]:
    flags = ["--device", arguments.device, "--max-restarts", "100000"]
    flags += ["--stall-timeout", str(arguments.stall_timeout)]
    if arguments.device == "fake":
        flags += ["--fake-step-ms", "20", "--max-model-len", "4096"]
    elif arguments.device == "cpu":
        flags += ["--kv-cache-memory", "1G", "--max-num-batched-tokens", "256"]
    return flags + rest


async def play(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    mesh = Mesh(serve_flags(arguments, rest))
    try:
        asks = draw_asks(arguments.streams, arguments.seed, tuple(arguments.tokens), arguments.device, arguments.longer)
        chaos = Chaos(mesh, asks, arguments)
        await chaos.learn_reference()
        print(f"the undisturbed run is known; {len(asks)} requests", file=sys.stderr)
        await chaos.run()
        report = chaos.report()
        report["processes"] = [summary(process) for process in mesh.processes()]
        report["hand_offs"] = metric(mesh.port, "request_hand_offs_total")
        report["loads"] = by_label(mesh.port, "kv_loads_total", "outcome")
        report["blocks_saved_since_restart"] = metric(mesh.port, "kv_saved_blocks_total")
        report["pages_leaked"] = await leaked(mesh.port)
    finally:
        code = mesh.stop()
        if arguments.keep_logs:
            arguments.keep_logs.write_text("\n".join(mesh.lines) + "\n")
    was_killed = code == -signal.SIGKILL and report["kills"].get("supervisor")  # its standby ended the mesh
    report["exit_code"] = 0 if was_killed else code
    report["faults"] = [
        {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(f).items()} for f in chaos.faults
    ]
    return report


async def leaked(port: int) -> int:
    """Pages that somebody still holds, of the ranks' KV caches and of the store, though nobody asks for anything any more."""
    limit = time.monotonic() + LEASES_S
    while True:
        ranks, store = by_label(port, "kv_cache_blocks", "state"), by_label(port, "kv_store_pages", "state")
        held = int(ranks.get("used", 0) + store.get("in_use", 0))
        if not held or time.monotonic() > limit:
            return held
        await asyncio.sleep(0.5)


def by_label(port: int, name: str, label: str) -> dict[str, float]:
    """The sums of a metric over all processes, by one of its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    sums: dict[str, float] = {}
    for line in lines:
        if line.startswith(f"meshlm:{name}{{"):
            found = re.search(f'[{{,]{label}="([^"]*)"', line)
            value = found[1] if found else ""
            sums[value] = sums.get(value, 0.0) + float(line.rpartition(" ")[2])
    return sums


def metric(port: int, name: str) -> float:
    """The sum of a metric over all ranks."""
    return sum(by_label(port, name, "engine").values())


def summary(process: Process) -> dict[str, Any]:
    return {name: getattr(process, name) for name in ("name", "state", "restarts", "rss_bytes")}


def main() -> int:
    arguments, rest = parse()
    report = asyncio.run(play(arguments, rest))
    harness.keep(arguments.json, report)
    print(json.dumps({name: value for name, value in report.items() if name not in ("faults", "failures")}, indent=1))
    wrong = ("lost", "duplicated", "wrong", "errors", "pages_leaked", "exit_code")
    return 1 if any(report[name] for name in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
