"""The scheduler's core alone: µs per plan and per result of N steady decodes, and of hashing prefixes.

python -P benchmarks/scheduler.py [--requests 256] [--steps 400] [--json FILE]
"""

import argparse
import json
import statistics
import time
from array import array
from pathlib import Path

from meshlm.protocol.admit_edge import Assign, EngineRequest
from meshlm.protocol.columns import pack_i32
from meshlm.protocol.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.protocol.kv import FullAttention, KVSpec, SlidingWindow
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.step_edge import StepPlan, StepResult, WorkerReady
from meshlm.runtime.events import PeerUp, Received
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.kv import hashes
from meshlm.scheduler_proc.limits import Limits

MAX_NUM_SEQS, BLOCK_SIZE, PROMPT_LEN = 1024, 16, 16
BESIDE_PROMPTS = 100  # steps, at most, that the first requests decode while the last ones' prompts are computed
LIFE = Incarnation(1)
WORKER, DETOKENIZER, COORDINATOR = Identity(Role.WORKER), Identity(Role.DETOKENIZER), Identity(Role.COORDINATOR)


def steady(num_requests: int, num_steps: int, specs: tuple[KVSpec, ...] = ()) -> dict[str, float]:
    """Median µs of plan() and of handling a result, with all requests decoding.

    Their prompts may take several steps; `num_steps` are those after them.
    """
    max_tokens = num_steps + BESIDE_PROMPTS
    num_blocks = num_requests * (-(-(PROMPT_LEN + max_tokens) // BLOCK_SIZE) + 1) * max(1, len(specs))
    core = Scheduler(
        Limits(max_model_len=PROMPT_LEN + max_tokens, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=8192)
    )
    core.handle(PeerUp(DETOKENIZER, LIFE), 0.0)
    core.handle(PeerUp(WORKER, LIFE), 0.0)
    core.handle(
        Received(
            WORKER, LIFE, WorkerReady(core.session, num_blocks, BLOCK_SIZE, MAX_NUM_SEQS, 8192, 50000, kv_specs=specs)
        ),
        0.0,
    )
    for number in range(num_requests):
        prompt = pack_i32(
            [number] * (PROMPT_LEN - number % BLOCK_SIZE)
        )  # each step, another share of them needs blocks
        work = EngineRequest(
            RequestId(f"r{number}"), Handle(number), prompt, SamplingParams(max_tokens=max_tokens), arrival_s=number
        )
        core.handle(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)), 0.0)
    plans: list[float] = []
    results: list[float] = []
    waiting = [send.message for _ in range(2) for send in core.plan(0)]
    while len(plans) < num_steps:
        plan = waiting.pop(0)
        assert isinstance(plan, StepPlan)
        num_rows = len(plan.rows) // 4
        tokens = array("i", [7]) * (sum(plan.samples) if plan.samples else num_rows)
        result = StepResult(session=plan.session, step=plan.step, token_ids=tokens.tobytes(), done_ns=1)
        event = Received(WORKER, LIFE, result)
        begun = time.perf_counter()
        core.handle(event, 0.0)
        handled = time.perf_counter()
        sends = core.plan(0)
        planned = time.perf_counter()
        waiting += [send.message for send in sends]
        if plan.num_tokens == num_rows == num_requests:
            results.append((handled - begun) * 1e6)
            plans.append((planned - handled) * 1e6)
    return {"plan_us": round(statistics.median(plans), 1), "result_us": round(statistics.median(results), 1)}


def hashing(num_tokens: int = 8192) -> float:
    """µs per 1,000 prompt tokens."""
    tokens = array("i", range(num_tokens))
    begun = time.perf_counter()
    hashes.extend([], {}, tokens, 16, num_tokens)
    return round((time.perf_counter() - begun) * 1e9 / num_tokens, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    if not (1 <= arguments.requests <= MAX_NUM_SEQS and arguments.steps >= 1):
        parser.error(f"--requests is 1 to {MAX_NUM_SEQS}, --steps 1 at least")
    result = {"requests": arguments.requests, **steady(arguments.requests, arguments.steps)}
    two = steady(arguments.requests, arguments.steps, (FullAttention(), SlidingWindow(64)))
    result |= {f"two_kinds_{name}": value for name, value in two.items()}
    result["hash_us_per_1000_tokens"] = hashing()
    print(json.dumps(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
