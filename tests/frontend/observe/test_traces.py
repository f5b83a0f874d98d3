"""Traces as a collector gets them: a real one, of its own process; and one that is away, which nobody waits for."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import answering
import pytest
from opentelemetry.sdk.trace.export import SpanExportResult
from spans import Collector, collector

from meshlm.frontend.observe.traces import MAX_QUEUED, Traces
from meshlm.frontend.openai.responses import AnswerHead, WholeResponse
from meshlm.frontend.requests.submits import build_each
from meshlm.protocol.config import ObservabilityConfig
from meshlm.protocol.edges.text import Finished, RequestEvent
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.ids import FinishReason, Handle, Identity, Role

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FIRST = First(3, 200_000, 400_000, 1, 100_000, 50_000)


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def warning(self, text: str, **fields: object) -> None:
        self.lines.append(text)

    info = warning


@pytest.fixture(scope="module")
def there() -> Iterator[Collector]:
    with collector() as found:
        yield found


def answer_of(name: str, num_choices: int = 1) -> Any:
    """An answer whose sequences began at 10 of the loop's clock, had their first token at 11 and ended at 13."""
    asked = answering.asking(False, num_choices=num_choices, num_returned=num_choices)
    answer = WholeResponse(AnswerHead(asked, name, 0, "the-model", lambda: None))
    list(build_each(answer, asked, lambda: Handle(1), -1, None))
    for choice in answer.choices:
        choice.opened_at, choice.first_at, choice.last_at = 10.0, 11.0, 13.0
        choice.first, choice.engine, choice.detokenizer = FIRST, "1", Identity(Role.DETOKENIZER, 2)
        choice.num_prompt_tokens = 7
        choice.token_ids.extend([1, 2, 3])
        events = (RequestEvent(500_000, "preemption"), RequestEvent(1_000_000, "retry", "scheduler_lost"))
        choice.finished = Finished(0, FinishReason.LENGTH, None, 3, events=events)
        choice.retried = ((10.5, "detokenizer_lost"),)
    return answer


def traces(endpoint: str, log: Log, **more: Any) -> Traces:
    return Traces(ObservabilityConfig(otlp_traces_endpoint=endpoint, **more), "frontend/3", "1.2", log)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_request_is_a_trace_over_all_processes(
    there: Collector, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    endpoint = f"http://127.0.0.1:{there.grpc}" if protocol == "grpc" else f"http://127.0.0.1:{there.http}/v1/traces"
    log, name = Log(), f"cmpl-{protocol}"
    sender, answer = traces(endpoint, log), answer_of(name)
    answer.trace_headers = {"traceparent": PARENT}
    sender.ended(answer, "/v1/completions", 200, 13.5, 1000.0)
    sender.close()
    root = there.root(name)
    assert (root["name"], root["trace"], root["parent"]) == ("llm_request", PARENT[3:35], PARENT[36:52])
    assert root["end"] - root["begin"] == 3_500_000_000
    assert root["end"] == 1_000_000_000_000
    found = root["attributes"]
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (7, 3)
    assert found["gen_ai.latency.time_to_first_token"] == 1.0
    assert found["gen_ai.latency.time_in_queue"] == pytest.approx(0.2)
    assert found["gen_ai.latency.time_in_model_inference"] == pytest.approx(2.4)
    assert found["gen_ai.response.model"] == "the-model"
    assert root["resource"]["service.name"] == "meshlm"
    hops = {span["name"]: span for span in there.children(root)}
    assert {name: span["attributes"]["meshlm.process"] for name, span in hops.items()} == {
        "encode": "detokenizer/2",
        "route": "coordinator/0",
        "queue": "scheduler/1",
        "prefill": "worker/1",
        "decode": "worker/1",
    }
    assert all(span["trace"] == root["trace"] for span in hops.values())
    begins = {name: round((span["begin"] - root["begin"]) / 1e9, 6) for name, span in hops.items()}
    assert begins == {"encode": 0.0, "route": 0.1, "queue": 0.15, "prefill": 0.35, "decode": 1.0}
    events = [(one["name"], one.get("reason"), round((one["at"] - root["begin"]) / 1e9, 3)) for one in root["events"]]
    assert sorted(events, key=lambda event: event[2]) == [
        ("retry", "detokenizer_lost", 0.5),
        ("first_token", None, 1.0),
        ("retry", "scheduler_lost", 2.0),
        ("preemption", None, 2.5),
    ]
    assert log.lines == []


def test_without_a_parent_a_trace_begins_and_detail_is_of_each_sequence(there: Collector) -> None:
    plain, detailed = (
        traces(f"http://127.0.0.1:{there.grpc}", Log(), **more) for more in ({}, {"collect_detailed_traces": ("all",)})
    )
    for name, sender in (("plain", plain), ("detailed", detailed)):
        sender.ended(answer_of(name, num_choices=3), "/v1/completions", 200, 13.5, 1000.0)
        sender.close()
    roots = there.root("plain"), there.root("detailed")
    assert [len(there.children(root)) for root in roots] == [5, 15]
    assert roots[0]["parent"] == "" != roots[0]["trace"] != roots[1]["trace"]


def test_a_collector_that_is_away_costs_its_spans_alone() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        log = Log()
        sender = traces(f"http://127.0.0.1:{nobody.getsockname()[1]}", log)
        answer = answer_of("lost")
        sender.ended(answer, "/v1/completions", 200, 13.5, 1000.0)
        begin = time.monotonic()
        number = MAX_QUEUED // 6 + 200  # more than wait
        for _ in range(number):
            sender.ended(answer, "/v1/completions", 200, 13.5, 1000.0)
        assert (time.monotonic() - begin) / number < 0.01, "a request waited"
        begin = time.monotonic()
        sender.close()
        assert time.monotonic() - begin < 3
        assert sender._exporter.export([]) is SpanExportResult.FAILURE, "nobody asks it again"
        end = time.monotonic() + 20
        while not log.lines and time.monotonic() < end:
            time.sleep(0.05)
        assert log.lines == ["traces are lost: their collector does not take them"]


def test_what_failed_is_marked(there: Collector) -> None:
    sender, answer = traces(f"http://127.0.0.1:{there.grpc}", Log()), answer_of("failed")
    answer.choices[0].first = None
    answer.choices[0].first_at = 0.0
    sender.ended(answer, "/v1/completions", 500, 13.5, 1000.0)
    sender.close()
    root = there.root("failed")
    assert root["status"] == 2
    assert root["attributes"]["http.response.status_code"] == 500
    assert there.children(root) == []


def test_what_its_sender_does_not_sample_is_not_sent(there: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """And OTEL_TRACES_SAMPLER decides where nobody has."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    sender = traces(f"http://127.0.0.1:{there.grpc}", Log())
    for name, parent in (("unsampled", PARENT[:-1] + "0"), ("nobody", ""), ("sampled", PARENT)):
        answer = answer_of(name)
        answer.trace_headers = {"traceparent": parent} if parent else {}
        sender.ended(answer, "/v1/completions", 200, 13.5, 1000.0)
    sender.close()
    there.root("sampled")
    assert not {"unsampled", "nobody"} & {span["attributes"].get("gen_ai.request.id") for span in there.seen}
