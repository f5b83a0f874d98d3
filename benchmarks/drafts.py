"""Drafts on a GPU, by the engine alone: how long a step that verifies 1 + K tokens of each row takes beside a plain one, and how many
tokens a second drafts give that are accepted as often as is said.

    python -P benchmarks/drafts.py MODEL [--batch 1 16 64] [--context 1024] [--drafts 4] [--length 2.7] [--json FILE] [engine flags]

--length: the mean number of tokens of a step with drafts, by chance (`rejection_sample_method` synthetic). Two steps are in flight, as
in the mesh. Dummy weights. engine flags may name a drafter: --speculative-config's keys as JSON.
"""

import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parent))
import harness
from engine_step import decodes, fill, make_engine, prompts

from meshlm.workers.engine.engine import ModelEngine


def steps(engine: ModelEngine, batch: int, context: int, drafts: int, count: int, *, warm: int = 12) -> dict[str, Any]:
    """Times `count` steps of so many rows, whose tokens are as far as the device knows; each row drafts so many."""
    fill(engine, prompts(batch, context, engine.facts.block_size, 2048, engine.facts.kv_specs), context)
    most, pending = np.full(batch, drafts, np.int32).tobytes(), deque[Any]()
    host, given = list[float](), 0
    begun = time.perf_counter()
    for nth in range(warm + count):
        if nth == warm:
            while pending:
                pending.popleft().wait()
            given, begun = 0, time.perf_counter()
            host.clear()
        plan = decodes(batch, context + nth)
        if drafts:
            plan = replace(plan, num_drafts=most, num_tokens=batch * (1 + drafts))
        before = time.perf_counter()
        pending.append(engine.step(plan, 0))
        host.append(time.perf_counter() - before)
        if len(pending) == 2:
            given += len(pending.popleft().wait().token_ids) // 4
    while pending:
        given += len(pending.popleft().wait().token_ids) // 4
    seconds = time.perf_counter() - begun
    return {
        "step_ms": round(1e3 * seconds / count, 3),
        "host_ms": round(1e3 * sorted(host)[len(host) // 2], 3),
        "tokens_a_step": round(given / count / batch, 3),
        "tok_s": round(given / seconds),
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--length", type=float, default=2.7)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--speculative", default='{"method": "ngram"}', help="keys of --speculative-config")
    args, extra = parser.parse_known_args()
    keys = json.loads(args.speculative) | {
        "num_speculative_tokens": args.drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": args.length,
    }
    engine = make_engine(args.model, [*extra, "--speculative-config", json.dumps(keys)])
    while engine.idle():
        pass
    results = []
    for batch in args.batch:
        plain = steps(engine, batch, args.context, 0, args.steps)
        with_drafts = steps(engine, batch, args.context, args.drafts, args.steps)
        found = {"batch": batch, "plain": plain, "drafts": with_drafts}
        found["step"] = round(with_drafts["step_ms"] / plain["step_ms"], 3)
        found["host"] = round(with_drafts["host_ms"] / plain["host_ms"], 3)
        found["speed"] = round(with_drafts["tok_s"] / plain["tok_s"], 3)
        results.append(found)
        print(json.dumps(found), flush=True)
    harness.keep(args.json, {"model": Path(args.model).name, "keys": keys, "context": args.context, "results": results})


if __name__ == "__main__":
    main()
