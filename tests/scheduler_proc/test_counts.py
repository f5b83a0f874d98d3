"""What a scheduler counts for /metrics: why prompts were not cached, who was preempted for whom, how long each hop of a step took."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from bench import COORDINATOR, LIFE, WORKER, Bench, reference
from small_model import SMALL

from meshlm.protocol.counts import ProcessCounts
from meshlm.protocol.edges.admit import Load, ReportLoad
from meshlm.protocol.edges.token import TokenDeltas
from meshlm.runtime.process.events import Received, Send, Tick
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.estimates import Estimates
from meshlm.scheduler_proc.limits import Limits


def limits(**changes: Any) -> Limits:
    return Limits(**{"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "async_depth": 1} | changes)


def run(bench: Bench, handle: int, prompt: list[int], max_tokens: int = 2, **params: object) -> None:
    bench.assign(handle, prompt, max_tokens, **params)
    while bench.plans:
        bench.step()


def counts(core: Scheduler) -> ProcessCounts:
    core.handle(Tick(0.0), 0.0)
    (send,) = core.report()
    assert isinstance(send.message, Load)
    assert send.message.counts is not None
    return send.message.counts


def misses(core: Scheduler) -> dict[str, float]:
    told = counts(core).counters.get("prefix_cache_miss_tokens", {})
    assert sum(told.values()) == core.batching.cache_queries - core.batching.cache_hits, "each token has one reason"
    return told


def test_why_a_prompt_was_not_cached() -> None:
    bench = Bench(limits(), 8, 4)  # 32 tokens
    run(bench, 1, list(range(100, 110)))  # two blocks and two tokens
    assert misses(bench.core) == {"unknown": 8, "last_block": 2}
    run(bench, 2, list(range(100, 110)))
    assert misses(bench.core) == {"unknown": 8, "last_block": 4}
    for handle in range(3, 6):
        run(bench, handle, [handle] * 24)  # all other pages are needed
    before = Counter(misses(bench.core))
    run(bench, 6, list(range(100, 110)))
    assert Counter(misses(bench.core)) - before == Counter(evicted=8, last_block=2)


def test_without_a_cache_all_is_missed() -> None:
    bench = Bench(limits(prefix_caching=False), 8, 4)
    run(bench, 1, [1] * 10)
    assert misses(bench.core) == {"disabled": 10}


def test_for_whom_requests_are_preempted() -> None:
    bench = Bench(limits(max_num_batched_tokens=16), 8, 4)
    bench.assign(1, [1] * 12, 15)
    bench.assign(2, [2] * 12, 15)
    while bench.plans:
        bench.step()
    assert counts(bench.core).counters["num_preemptions_by_reason"] == {"decode": bench.core.batching.num_preemptions}
    bench.assign(3, [3] * 4, 4)
    bench.lose_worker()
    assert counts(bench.core).counters["num_preemptions_by_reason"]["worker_lost"] == 1


def test_each_hop_of_a_step_is_observed() -> None:
    bench = Bench(limits(), 8, 4)
    bench.assign(1, [1] * 4, 1)
    plan, now_ns = bench.plans.popleft(), int(bench.now * 1e9)
    times = {"received_ns": now_ns + 1_000_000, "launched_ns": now_ns + 3_000_000, "done_ns": now_ns + 7_000_000}
    bench.now += 0.008
    bench.event(Received(WORKER, LIFE, msgspec.structs.replace(bench.model.run(plan), **times)))
    told = counts(bench.core).histograms
    hops = {name.split("_")[1]: round(one.total, 6) for name, one in told.items() if name.startswith("step_")}
    assert hops == {"schedule": 0.0, "send": 0.001, "launch": 0.002, "device": 0.004, "return": 0.002}
    assert told["iteration_tokens_total"].total == 5  # four of the prompt, and the one that it gave


def test_steps_have_the_prompts_tokens_and_those_that_they_generate() -> None:
    """As in vLLM: 9 + 10 for each request, though the last token is never computed."""
    bench = Bench(limits(), 64, 4)
    for handle in range(1, 11):
        bench.assign(handle, [handle, *range(8)], 10)
    bench.finish()
    told = counts(bench.core).histograms["iteration_tokens_total"]
    assert told.total == 190


def test_a_token_that_comes_behind_the_end_is_not_generated() -> None:
    bench = Bench(limits(async_depth=2), 64, 4)
    prompt = [1] * 9
    (first, *_) = reference(prompt, 1)
    bench.assign(1, prompt, 10, stop=(first,))
    bench.finish()
    assert counts(bench.core).histograms["iteration_tokens_total"].total == 10


def test_clocks_of_other_hosts_are_not_compared() -> None:
    bench = Bench(limits(), 8, 4)
    run(bench, 1, [1] * 4)  # its worker's clock says 0 and 1
    assert sum(counts(bench.core).histograms["step_send_time_seconds"].counts) == 0


def test_gauges_are_of_this_moment() -> None:
    bench = Bench(limits(max_num_seqs=1), 8, 4)
    bench.assign(1, [1] * 6, 20)
    bench.assign(2, [2] * 6, 20)
    gauges = counts(bench.core).gauges
    assert gauges["num_requests_waiting_by_reason"] == {"capacity": 1, "deferred": 0}
    assert gauges["kv_cache_blocks"] == {"used": 2, "cached": 0, "empty": 6}
    assert gauges["kv_cache_group_blocks"] == {"full": 2}
    assert gauges["kv_cache_fragmentation_perc"] == {"": 0.25}


@pytest.mark.parametrize("message", [Tick(0.0), Received(COORDINATOR, LIFE, ReportLoad(5))])
def test_counts_come_when_they_are_asked_for_and_once_a_second(message: Tick | Received) -> None:
    """Not with each Load: a step that begins a request would carry all histograms."""
    bench = Bench(limits(), 8, 4)
    loads: list[Load] = []

    def take(sends: list[Send]) -> None:
        loads.extend(send.message for send in sends if isinstance(send.message, Load))
        Bench.take(bench, sends)

    bench.take = take  # type: ignore[method-assign]
    run(bench, 1, [1] * 4)
    assert loads
    assert not any(load.counts for load in loads)
    bench.event(message)  # type: ignore[arg-type]
    assert loads[-1].counts is not None


def test_how_long_pages_live() -> None:
    bench = Bench(limits(kv_metrics_sample=1.0), 8, 4)
    run(bench, 1, list(range(100, 109)))
    bench.now += 10
    run(bench, 2, list(range(100, 109)))  # finds the first two pages
    bench.now += 5
    for handle in range(3, 6):
        run(bench, handle, [handle] * 24)  # needs them
    told = counts(bench.core).histograms
    lived, idle = told["kv_block_lifetime_seconds"], told["kv_block_idle_before_evict_seconds"]
    assert lived.counts[13] == 2, "from 10 to 20 seconds"
    assert idle.counts[12] == 2, "5 seconds and a little"
    assert sum(told["kv_block_reuse_gap_seconds"].counts) == 0, "each was used again once"


def test_pages_are_sampled() -> None:
    some, all_of_them = (Bench(limits(kv_metrics_sample=share), 8, 4) for share in (0.25, 1.0))
    for bench in (some, all_of_them):
        for handle in range(1, 40):
            run(bench, handle, [handle] * 16)
    number = [sum(counts(bench.core).histograms["kv_block_lifetime_seconds"].counts) for bench in (some, all_of_them)]
    assert 0.15 < number[0] / number[1] < 0.35


def test_drafts_are_counted_as_they_are_accepted() -> None:
    bench = Bench(limits(), 64, 4, max_drafts=3)
    run(bench, 1, [1] * 4, max_tokens=30)
    told = counts(bench.core).counters
    accepted = told["spec_decode_num_accepted_tokens"][""]
    assert sum(told["spec_decode_num_accepted_tokens_per_pos"].values()) == accepted > 0
    assert told["spec_decode_num_draft_tokens"][""] == sum(bench.model.drafted) > accepted
    assert told["spec_decode_num_drafts"][""] == sum(drafted > 0 for drafted in bench.model.drafted)


def test_drafts_are_counted_by_request_where_they_are_asked_for() -> None:
    plain, asked = (Bench(limits(counts_drafts=counts_drafts), 64, 4, max_drafts=3) for counts_drafts in (False, True))
    for bench in (plain, asked):
        bench.assign(1, [1] * 4, 30)
        bench.assign(2, [2] * 4, 20)
        bench.finish()
    assert plain.drafts == {}
    told = counts(asked.core).counters
    assert set(asked.drafts) == {1, 2}
    drafts = b"".join(asked.drafts.values())
    assert sum(drafts[::2]) == told["spec_decode_num_draft_tokens"][""]
    assert sum(drafts[1::2]) == told["spec_decode_num_accepted_tokens"][""] > 0
    assert len(drafts) == 2 * told["spec_decode_num_drafts"][""]


def test_estimates_are_counted_when_asked_for() -> None:
    bench = Bench(limits(), 8, 4)
    bench.core.estimates = Estimates(SMALL, 1)
    run(bench, 1, [1] * 4, max_tokens=2)
    told = counts(bench.core).counters
    expected = [bench.core.estimates.of_step(*step) for step in (([0], [4], 1), ([4], [1], 1))]
    assert told["estimated_flops_per_gpu"][""] == sum(one.flops for one in expected)


def test_an_end_tells_when_its_request_was_preempted() -> None:
    bench, ends = Bench(limits(max_num_batched_tokens=16), 8, 4), []

    def deltas(deltas: TokenDeltas) -> None:
        ends.extend(deltas.ended)
        Bench._deltas(bench, deltas)

    bench._deltas = deltas  # type: ignore[method-assign]
    bench.assign(1, [1] * 12, 15)
    bench.assign(2, [2] * 12, 15)
    while bench.plans:
        bench.step()
    told = [end.preempted_us for end in ends]
    assert told[0] == ()
    assert len(told[1]) == bench.core.batching.num_preemptions > 0
    assert all(0 < ago_us < bench.now * 1e6 for ago_us in told[1])
