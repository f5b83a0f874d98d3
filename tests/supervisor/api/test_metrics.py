"""LLM.get_metrics: what sequences took and what ranks are at, in vLLM's classes."""

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from meshlm.protocol.counts import ProcessCounts
from meshlm.protocol.edges.control import AskStats, MeshStats, RankStats
from meshlm.protocol.edges.text import Accepted, Finished, Submit, TextDeltas, TextPrompt
from meshlm.protocol.edges.token import First
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, FinishReason, Identity, Incarnation, Role
from meshlm.supervisor.api.client import Client, Sent, name_of
from meshlm.supervisor.api.metrics import Counter, Counts, Gauge, Histogram, Metric
from meshlm.supervisor.api.outputs import CompletionOutput, RequestOutput

DETOKENIZER = Identity(Role.DETOKENIZER)


def rank(number: int = 0, *, queries: int = 0, incarnation: int = 1) -> RankStats:
    return RankStats(number, 3, 2, 0.5, queries, queries // 2, 1, 0, 0, incarnation=incarnation)


def value(metrics: list[Metric], name: str, engine: str = "0", **labels: str) -> Any:
    wanted = {"model_name": "m", "engine": engine, **labels}
    (found,) = [metric for metric in metrics if metric.name == f"meshlm:{name}" and metric.labels == wanted]
    return found.value if isinstance(found, Counter | Gauge) else found


def taken(counts: Counts, *ranks: RankStats) -> list[Metric]:
    stats = MeshStats(True, ranks=ranks)
    counts.take(stats)
    return counts.snapshot(stats, "m")


def test_what_ranks_are_at() -> None:
    found = taken(Counts(), rank(), rank(1))
    for engine in ("0", "1"):
        assert value(found, "num_requests_running", engine) == 3.0
        assert value(found, "num_requests_waiting", engine) == 2.0
        assert value(found, "kv_cache_usage_perc", engine) == 0.5
        assert value(found, "num_preemptions", engine) == 1
        assert value(found, "request_success", engine, finished_reason="stop") == 0


def test_drafts_of_ranks_as_vllm_has_them() -> None:
    """Only where some were drafted; the positions as one vector, whichever of them were counted."""

    def drafting(incarnation: int, **positions: float) -> RankStats:
        counters: dict[str, dict[str, float]] = {
            f"spec_decode_num_{name}": {"": 10.0} for name in ("drafts", "draft_tokens")
        }
        counters["spec_decode_num_accepted_tokens_per_pos"] = {name[1:]: count for name, count in positions.items()}
        return msgspec.structs.replace(rank(incarnation=incarnation), counts=ProcessCounts(counters))

    counts = Counts()
    counts.take(MeshStats(True, ranks=(drafting(1, p0=6.0, p2=1.0),)))
    found = taken(counts, drafting(2, p0=2.0, p1=2.0), rank(1))
    assert value(found, "spec_decode_num_drafts") == 20
    assert value(found, "spec_decode_num_accepted_tokens_per_pos").values == [8, 2, 1]
    drafts = [(one.name, one.labels["engine"]) for one in found if "spec_decode" in one.name]
    assert ("meshlm:spec_decode_num_accepted_tokens", "0") not in drafts, "none was counted"
    assert {engine for _, engine in drafts} == {"0"}


def test_counters_of_a_rank_never_fall() -> None:
    """A scheduler that took another one's place counts from 0; nobody need have asked while the first one lived."""
    counts = Counts()
    counts.take(MeshStats(True, ranks=(rank(queries=100),)))
    counts.take(MeshStats(True, ranks=(rank(queries=120),)))
    found = taken(counts, rank(queries=7, incarnation=2))
    assert value(found, "prefix_cache_queries") == 127


def test_histograms_have_the_limits_of_prometheus() -> None:
    counts = Counts()
    counts.max_model_len = 100
    engine = counts.begun(First(4, 20_000, 30_000), 0.05, 12)
    counts.ended(engine, FinishReason.LENGTH, (12, 5), (1.5, 0.4))
    counts.ended("", FinishReason.ABORT, (0, 0), (1.0, 0.0))
    found = counts.snapshot(MeshStats(True), "m")
    assert value(found, "prompt_tokens") == 12
    assert value(found, "prompt_tokens_cached") == 4
    assert value(found, "generation_tokens") == 5
    ttft: Histogram = value(found, "time_to_first_token_seconds")
    assert (ttft.count, ttft.sum) == (1, 0.05)
    assert (ttft.buckets["0.04"], ttft.buckets["0.06"], ttft.buckets["+Inf"]) == (0, 1, 1)
    prompt: Histogram = value(found, "request_prompt_tokens")
    assert list(prompt.buckets) == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "+Inf"]
    assert prompt.buckets["10.0"] == 0 < prompt.buckets["20.0"] == 1
    assert value(found, "request_time_per_output_token_seconds").sum == pytest.approx(0.1)
    assert value(found, "request_success", finished_reason="length") == 1
    assert value(found, "request_success", "", finished_reason="abort") == 1
    assert value(found, "e2e_request_latency_seconds", "").count == 0, "it had no token"


class StubMesh:
    """A detokenizer that answers with two tokens, computed by rank 1, and a coordinator that tells its figures."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def in_hand_of(self, peer: Identity, incarnation: Incarnation) -> tuple[str, ...]:
        return ()

    def peers(self, role: Role) -> list[Identity]:
        return [DETOKENIZER]

    def send(self, peer: Identity, message: Struct) -> None:
        if isinstance(message, AskStats):
            assert peer == COORDINATOR
            self._client.on_message(peer, MeshStats(True, ranks=(rank(), rank(1)), asked=True))
        elif isinstance(message, Submit):
            handle = message.handles[0]
            self._client.on_message(peer, Accepted((handle,), 3))
            first = TextDeltas(
                pack_i32([handle]), pack_i32([0]), b"", pack_i32([7]), ["x"], first={0: First(1, dp_rank=1)}
            )
            self._client.on_message(peer, first)
            end = [Finished(0, FinishReason.STOP)]
            self._client.on_message(peer, TextDeltas(pack_i32([handle]), pack_i32([1]), b"", pack_i32([8]), ["y"], end))


def test_the_client_counts_what_it_hears() -> None:
    async def run() -> list[Metric]:
        client = Client()
        mesh: Any = StubMesh(client)
        client.mesh_client.mesh = mesh
        client.on_peer_up(DETOKENIZER, Incarnation(1))
        submit = Submit((client.new_handle(),), (name_of("r", 0),), TextPrompt("a"), SamplingParams())
        await client.run(iter([Sent(submit, RequestOutput("r", "a", [], [CompletionOutput(0)]))]), None)
        return await client.metrics("m")

    found = asyncio.run(run())
    assert value(found, "prompt_tokens", "1") == 3
    assert value(found, "prompt_tokens_cached", "1") == 1
    assert value(found, "generation_tokens", "1") == 2
    assert value(found, "request_success", "1", finished_reason="stop") == 1
    assert value(found, "time_to_first_token_seconds", "1").count == 1
    assert value(found, "request_generation_tokens", "1").sum == 2
    assert value(found, "num_requests_running", "0") == 3.0


def test_who_gives_up_is_counted_and_has_no_latency() -> None:
    async def run() -> list[Metric]:
        client = Client()
        mesh: Any = StubMesh(client)
        client.mesh_client.mesh = mesh
        client.on_peer_up(DETOKENIZER, Incarnation(1))
        mesh.send = lambda peer, message: StubMesh.send(mesh, peer, message) if isinstance(message, AskStats) else None
        submit = Submit((client.new_handle(),), (name_of("r", 0),), TextPrompt("a"), SamplingParams())
        asked = asyncio.ensure_future(
            client.run(iter([Sent(submit, RequestOutput("r", "a", [], [CompletionOutput(0)]))]), None)
        )
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        return await client.metrics("m")

    found = asyncio.run(run())
    assert value(found, "request_success", "", finished_reason="abort") == 1
    assert value(found, "e2e_request_latency_seconds", "").count == 0
