"""Many prompts at once through the Python API and the fake device: how long until the GPU would have work, and who takes the CPU.

    python -P benchmarks/bursts.py MODEL [--prompts 1 64 1000] [--kinds ids text] [--rounds 5] [--step-ms 0] [--json FILE]

`first_plan_ms`: from generate() to the worker's first plan. `last_token_ms`: to the first token of the last request, so all have been
encoded, routed and planned. `cpu_ms` is of each process, from generate() to its return. Medians over the rounds. MODEL is a folder with
config.json and a tokenizer; prompts of text are pseudo-words of about 230 tokens, or ShareGPT's questions (--sharegpt FILE).
"""

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from meshlm import LLM, SamplingParams
from meshlm.protocol.edges.text import TextDeltas
from meshlm.supervisor.bench.data import Reading, sharegpt

IDS, WORDS = 512, 170  # tokens of a prompt of ids, words of one of text


class Watch:
    """Notes when plans and first tokens came, beside the client's own reading."""

    def __init__(self, llm: LLM) -> None:
        self._deliver = llm._client.on_message
        llm._client.on_message = self.on_message  # type: ignore[method-assign]
        self.first_plan_ns = self.last_token_ns = 0

    def on_message(self, peer: Any, message: Any) -> None:
        if isinstance(message, TextDeltas):
            if message.timings_ns and not self.first_plan_ns:
                self.first_plan_ns = message.timings_ns[2]
            if message.first:
                self.last_token_ns = time.monotonic_ns()
        self._deliver(peer, message)


def run_seconds(pid: int) -> float:
    """What all threads of a process ran."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def processes() -> dict[str, int]:
    """This one and its children by their titles."""
    found = {"client": os.getpid()}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            title = (folder / "cmdline").read_text()
        except OSError:
            continue
        if parent == os.getpid() and title.startswith("meshlm: "):
            found[title.strip("\0 ").removeprefix("meshlm: ").split("\0")[0]] = int(folder.name)
    return found


def make_prompts(kind: str, count: int, seed: int) -> list[Any]:
    source = random.Random(seed)
    if kind == "ids":
        return [[source.randrange(100, 10000) for _ in range(IDS)] for _ in range(count)]
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(source.choices(letters, range(26, 0, -1), k=source.randint(1, 9))) for _ in range(4000)]
    return [" ".join(source.choices(words, k=WORDS)) for _ in range(count)]


def burst(llm: LLM, prompts: list[Any], tokens: int, pids: dict[str, int]) -> dict[str, Any]:
    params = [SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True) for _ in prompts]
    before = {name: run_seconds(pid) for name, pid in pids.items()}
    watch = Watch(llm)
    begun = time.monotonic_ns()
    llm.generate(prompts, params, use_tqdm=False)
    ended = time.monotonic_ns()
    llm._client.on_message = watch._deliver  # type: ignore[method-assign]
    used = {name: round((run_seconds(pid) - before[name]) * 1e3, 2) for name, pid in pids.items()}
    found = {"first_plan_ms": watch.first_plan_ns, "last_token_ms": watch.last_token_ns, "end_ms": ended}
    return {**{name: round((at - begun) / 1e6, 2) for name, at in found.items()}, "cpu_ms": used}


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {
        name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0] if name != "cpu_ms"
    }
    result["cpu_ms"] = {
        name: round(statistics.median(run["cpu_ms"][name] for run in runs), 2) for name in runs[0]["cpu_ms"]
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 64, 1000])
    parser.add_argument("--kinds", choices=["ids", "text"], nargs="+", default=["ids", "text"])
    parser.add_argument("--tokens", type=int, default=1, help="output tokens of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--sharegpt", help="ShareGPT's JSON file, for prompts of text")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    llm = LLM(
        arguments.model,
        device="fake",
        load_format="dummy",
        max_model_len=4096,
        max_num_seqs=1024,
        max_num_batched_tokens=16384,
        fake_step_ms=arguments.step_ms,
        disable_log_requests=True,
    )
    pids = processes()
    results = []
    for kind in arguments.kinds:
        for count in arguments.prompts:
            runs = []
            for seed in range(arguments.rounds + 1):  # the first warms up
                prompts = make_prompts(kind, count, seed)
                if kind == "text" and arguments.sharegpt:
                    samples = sharegpt(Reading(arguments.sharegpt, count, seed), llm.encode, None)
                    prompts = [f"{seed} {sample.prompt}" for sample in samples]  # no prefix is cached
                runs.append(burst(llm, prompts, arguments.tokens, pids))
            results.append({"kind": kind, "prompts": count, **medians(runs[1:])})
            print(json.dumps(results[-1]), flush=True)
    llm.shutdown()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
