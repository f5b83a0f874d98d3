"""The scheduler's core alone: µs per plan and per result of N steady decodes, and of hashing prefixes.

python -P benchmarks/scheduler.py [--requests 256] [--steps 400] [--json FILE]
"""

import argparse
import json
import statistics
import time
from array import array
from pathlib import Path

from meshlm.protocol.admit_edge import Assign, Work
from meshlm.protocol.columns import pack_i32
from meshlm.protocol.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.step_edge import StepPlan, StepResult, WorkerReady
from meshlm.scheduler_proc import prefix
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.events import Limits, PeerUp, Received

LIFE = Incarnation(1)
WORKER, DETOKENIZER, COORDINATOR = Identity(Role.WORKER), Identity(Role.DETOKENIZER), Identity(Role.COORDINATOR)


def steady(num_requests: int, num_steps: int) -> dict[str, float]:
    """Median µs of plan() and of handling a result, with all requests decoding."""
    core = Scheduler(Limits(max_model_len=8192, max_num_seqs=1024, max_num_batched_tokens=8192))
    core.handle(PeerUp(DETOKENIZER, LIFE), 0.0)
    core.handle(PeerUp(WORKER, LIFE), 0.0)
    core.handle(Received(WORKER, LIFE, WorkerReady(core.session, 60000, 16, 1024, 8192, 50000)), 0.0)
    for number in range(num_requests):
        prompt = pack_i32([number] * 16)
        work = Work(RequestId(f"r{number}"), Handle(number), prompt, SamplingParams(max_tokens=8000), arrival_s=number)
        core.handle(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)), 0.0)
    plans: list[float] = []
    results: list[float] = []
    waiting = [send.message for _ in range(2) for send in core.plan(0)]
    for _ in range(num_steps):
        plan = waiting.pop(0)
        assert isinstance(plan, StepPlan)
        tokens = array("i", [7]) * num_requests
        result = StepResult(session=plan.session, step=plan.step, token_ids=tokens.tobytes(), done_ns=1)
        event = Received(WORKER, LIFE, result)
        begun = time.perf_counter()
        core.handle(event, 0.0)
        handled = time.perf_counter()
        sends = core.plan(0)
        planned = time.perf_counter()
        waiting += [send.message for send in sends]
        results.append((handled - begun) * 1e6)
        plans.append((planned - handled) * 1e6)
    return {"plan_us": round(statistics.median(plans), 1), "result_us": round(statistics.median(results), 1)}


def hashing(num_tokens: int = 8192) -> float:
    """µs per 1,000 prompt tokens."""
    tokens = array("i", range(num_tokens))
    begun = time.perf_counter()
    prefix.extend([], prefix.seed_hash(), tokens, 16, num_tokens)
    return round((time.perf_counter() - begun) * 1e9 / num_tokens, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    result = {"requests": arguments.requests, **steady(arguments.requests, arguments.steps)}
    result["hash_us_per_1000_tokens"] = hashing()
    print(json.dumps(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
