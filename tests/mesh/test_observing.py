"""A mesh as its operators see it: a request's trace at a collector of its own process, and a timeline of all processes."""

import json
import os
import signal
from pathlib import Path

import httpx
import pytest
from chrome_format import check
from fake_answers import reference
from perfetto import perfetto
from serving import meshlm, serving
from spans import collector

pytestmark = pytest.mark.mesh

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PROCESSES = {"frontend/0", "detokenizer/0", "coordinator/0", "scheduler/0", "worker/0"}
STEP = {"plan", "launch", "step", "result", "decode", "write"}
LONG = 1800  # tokens, 5 seconds of them: `meshlm trace` starts and ends meanwhile


def test_a_request_s_trace_goes_through_a_death_and_a_timeline_shows_all_processes(tmp_path: Path) -> None:
    flags = ("--device", "fake", "--fake-step-ms", "3", "--max-model-len", "4096")
    with collector() as there, serving(*flags, "--otlp-traces-endpoint", f"http://127.0.0.1:{there.grpc}") as server:
        body = {"prompt": [300] * 20, "max_tokens": LONG, "ignore_eos": True, "stream": True, "return_token_ids": True}
        headers = {"traceparent": PARENT}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=300) as answer:
            lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
            first = next(lines)
            done = meshlm(server, "trace", "--seconds", "0.6", "-o", str(tmp_path / "trace.json"))
            assert done.returncode == 0, done.stderr
            os.kill(server.pid("scheduler"), signal.SIGKILL)
            ids = [token for line in (first, *lines) for token in line["choices"][0].get("token_ids") or []]
        assert ids == reference([300] * 20, LONG)

        root = there.root(first["id"])
        assert (root["trace"], root["parent"]) == (PARENT[3:35], PARENT[36:52])
        assert root["attributes"]["gen_ai.usage.completion_tokens"] == LONG
        hops = {span["name"]: span["attributes"]["meshlm.process"] for span in there.children(root)}
        assert hops == {
            "encode": "detokenizer/0",
            "route": "coordinator/0",
            "queue": "scheduler/0",
            "prefill": "worker/0",
            "decode": "worker/0",
        }
        assert ("retry", "scheduler_lost") in {(event["name"], event.get("reason")) for event in root["events"]}

        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        check(events)
        with perfetto(tmp_path / "trace.json") as found:
            assert not found.complaints()
            assert found.query("select count(1) as n from slice") == [[sum(one["ph"] == "X" for one in events)]]
        names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
        assert set(names.values()) == PROCESSES
        assert {one["name"] for one in events if one["ph"] == "X"} >= STEP
        whole = [flow for flow in flows(events) if len(flow) == len(STEP)]
        assert len(whole) > 50, "arrows go through all processes of a step"
        answer_of_bad = meshlm(server, "trace", "--seconds", "0.1", "--gpu", "-o", str(tmp_path / "gpu.json"))
        assert answer_of_bad.returncode != 0
        assert "--profiler-dir" in answer_of_bad.stderr


def flows(events: list[dict[str, object]]) -> list[list[str]]:
    found: dict[object, list[str]] = {}
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            found.setdefault(event["id"], []).append(str(event["ph"]))
    return list(found.values())
