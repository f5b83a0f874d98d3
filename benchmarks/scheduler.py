"""The scheduler's core alone: µs per plan and per result of N steady decodes, with one KV group, with two, with three, and of hashing
prefixes. And of N decodes with drafts, of which some are accepted, beside plain ones of as many rows as those get tokens in a step.

python -P benchmarks/scheduler.py [--requests 256] [--steps 400] [--json FILE]
"""

import json
import statistics
import sys
import time
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import harness

from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.edges.step import StepPlan, StepResult, WorkerReady
from meshlm.protocol.kv import FullAttention, KVSpec, RecurrentState, SlidingWindow
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.events import PeerUp, Received
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.kv import hashes
from meshlm.scheduler_proc.limits import Limits

MAX_NUM_SEQS, BLOCK_SIZE, PROMPT_LEN = 1024, 16, 64
DRAFTS, STEP_NS = 4, 10_000_000
BESIDE_PROMPTS = 100  # steps, at most, that the first requests decode while the last ones' prompts are computed
LIFE = Incarnation(1)
STATES = RecurrentState("align", 32)
KINDS: dict[str, tuple[KVSpec, ...]] = {
    "one_kind": (),
    "two_kinds": (FullAttention(), SlidingWindow(64)),
    "three_kinds": (FullAttention(), SlidingWindow(64), STATES),
    "full_and_two_groups_of_windows": (FullAttention(), SlidingWindow(64), SlidingWindow(64)),
    "full_and_two_groups_of_states": (FullAttention(), STATES, STATES),
}
WORKER, DETOKENIZER, COORDINATOR = Identity(Role.WORKER), Identity(Role.DETOKENIZER), Identity(Role.COORDINATOR)


class Steady:
    """A scheduler whose requests all decode, once their prompts are computed, which may take several steps."""

    def __init__(self, num_requests: int, num_steps: int, specs: tuple[KVSpec, ...] = (), drafts: int = 0) -> None:
        self._num_requests, max_tokens = num_requests, (1 + drafts) * (num_steps + BESIDE_PROMPTS)
        self._now_ns = self.num_given = 0  # num_given: tokens of the last step
        num_blocks = num_requests * (-(-(PROMPT_LEN + max_tokens) // BLOCK_SIZE) + 1) * max(1, len(specs))
        self._core = core = Scheduler(
            Limits(max_model_len=PROMPT_LEN + max_tokens, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=8192)
        )
        core.handle(PeerUp(DETOKENIZER, LIFE), 0.0)
        core.handle(PeerUp(WORKER, LIFE), 0.0)
        sizes = (num_blocks, BLOCK_SIZE, MAX_NUM_SEQS, 8192, 50000)
        ready = WorkerReady(core.session, *sizes, kv_specs=specs, max_drafts=drafts)
        core.handle(Received(WORKER, LIFE, ready), 0.0)
        for number in range(num_requests):
            # Each step, another share of them needs blocks, and gives some back.
            prompt = pack_i32([number] * (PROMPT_LEN - number % PROMPT_LEN))
            sampling = SamplingParams(max_tokens=max_tokens)
            work = EngineRequest(RequestId(f"r{number}"), Handle(number), prompt, sampling, arrival_s=number)
            core.handle(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)), 0.0)
        self._waiting = [send.message for _ in range(2) for send in core.plan(0)]

    def step(self) -> tuple[float, float] | None:
        """µs of plan() and of handling a result; None while prompts are computed."""
        plan = self._waiting.pop(0)
        assert isinstance(plan, StepPlan)
        num_rows = len(plan.rows) // 4
        counts = [1] * (sum(plan.samples) if plan.samples else num_rows)
        if plan.num_drafts:  # a row gets from one to all of the tokens that it may
            allowed = enumerate(ints(plan.num_drafts))
            counts = [1 + (row + plan.step) % (1 + most) for row, most in allowed]
        self.num_given = sum(counts)
        self._now_ns += STEP_NS
        result = StepResult(
            session=plan.session,
            step=plan.step,
            token_ids=(array("i", [7]) * self.num_given).tobytes(),
            counts=pack_i32(counts) if plan.num_drafts else b"",
            drafted=plan.num_drafts,
            done_ns=self._now_ns,
        )
        event = Received(WORKER, LIFE, result)
        begun = time.perf_counter()
        self._core.handle(event, 0.0)
        handled = time.perf_counter()
        sends = self._core.plan(0)
        planned = time.perf_counter()
        self._waiting += [send.message for send in sends]
        if num_rows == self._num_requests and not plan.counts:
            return (planned - handled) * 1e6, (handled - begun) * 1e6
        return None


def medians_of(ones: list[Steady], num_steps: int) -> list[dict[str, float]]:
    """Step by step beside one another: what else the machine does meets all of them alike."""
    found: list[list[tuple[float, float]]] = [[] for _ in ones]
    while len(found[0]) < num_steps:
        for one, times in zip(ones, found, strict=True):
            if (took := one.step()) is not None:
                times.append(took)
    medians = [[round(statistics.median(column), 1) for column in zip(*times, strict=True)] for times in found]
    return [{"plan_us": plan, "result_us": result} for plan, result in medians]


def drafting(num_requests: int, num_steps: int) -> dict[str, float]:
    """With drafts, and plain with as many tokens a step."""
    probe = Steady(num_requests, num_steps, drafts=DRAFTS)
    given = [probe.num_given for _ in range(num_steps) if probe.step() is not None]
    num_tokens = min(MAX_NUM_SEQS, round(statistics.mean(given)))
    ones = [Steady(num_requests, num_steps, drafts=DRAFTS), Steady(num_tokens, num_steps)]
    drafted, plain = medians_of(ones, num_steps)
    result: dict[str, float] = {f"drafts_{what}": value for what, value in drafted.items()}
    result |= {"drafts_tokens_per_step": num_tokens}
    result |= {f"as_many_tokens_{what}": value for what, value in plain.items()}
    return result | {"drafts_times_plain": round(sum(drafted.values()) / sum(plain.values()), 3)}


def hashing(num_tokens: int = 8192) -> float:
    """µs per 1,000 prompt tokens."""
    tokens = array("i", range(num_tokens))
    begun = time.perf_counter()
    hashes.extend([], hashes.ExtraKeys(), tokens, 16, num_tokens)
    return round((time.perf_counter() - begun) * 1e9 / num_tokens, 1)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    if not (1 <= arguments.requests <= MAX_NUM_SEQS and arguments.steps >= 1):
        parser.error(f"--requests is 1 to {MAX_NUM_SEQS}, --steps 1 at least")
    ones = [Steady(arguments.requests, arguments.steps, specs) for specs in KINDS.values()]
    one, *others = medians_of(ones, arguments.steps)
    result = {"requests": arguments.requests, **one}
    for name, measured in zip(list(KINDS)[1:], others, strict=True):
        result |= {f"{name}_{what}": value for what, value in measured.items()}
        result[f"{name}_times_one"] = round(sum(measured.values()) / sum(one.values()), 3)
    result |= drafting(arguments.requests, arguments.steps)
    result["hash_us_per_1000_tokens"] = hashing()
    print(json.dumps(result))
    harness.keep(arguments.json, result)


if __name__ == "__main__":
    main()
