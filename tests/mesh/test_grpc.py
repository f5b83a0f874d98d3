"""`meshlm serve --grpc`: the service that routers call, by gRPC's own client, with kills."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_answers import reference
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from serving import Serving, serving
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from waiting import free_ports, until

pytestmark = pytest.mark.mesh

KEY = (("authorization", "Bearer secret"),)
LIMIT_S = 60
NAME = "vllm.grpc.engine.VllmEngine"


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    flags = (
        "--device",
        "fake",
        "--max-model-len",
        "4096",
        "--api-key",
        "secret",
        "--fake-step-ms",
        "4",
        "--server-dev-mode",
    )
    with serving("--grpc", *flags, says="(gRPC)") as found:
        yield found


@pytest.fixture
def channel(server: Serving) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as found:
        yield found


@pytest.fixture
def stub(channel: Any) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(channel)


def asking(prompt: list[int], count: int, **more: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, n=more.pop("n", 1))
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=params, **more)


def generate(stub: Any, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return list(stub.Generate(request, metadata=KEY, timeout=LIMIT_S))


def test_whole_and_streamed_answers(stub: Any) -> None:
    prompt = list(range(300, 320))
    (message,) = generate(stub, asking(prompt, 20))
    assert list(message.complete.output_ids) == reference(prompt, 20)
    assert (message.complete.finish_reason, message.complete.prompt_tokens) == ("length", 20)
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for message in generate(stub, asking(prompt, 20, n=2, stream=True)):
        if message.HasField("chunk"):
            streamed[message.chunk.index] += message.chunk.token_ids
    assert streamed == {0: reference(prompt, 20), 1: reference(prompt, 20)}


@pytest.mark.parametrize("role", ["worker", "scheduler", "detokenizer"])
def test_a_kill_loses_no_token(server: Serving, stub: Any, role: str) -> None:
    prompt = [700, 701, *role.encode()]
    found: list[int] = []
    killed = False
    for message in stub.Generate(asking(prompt, 300, stream=True), metadata=KEY, timeout=LIMIT_S):
        found += message.chunk.token_ids
        if len(found) >= 30 and not killed:
            killed = True
            os.kill(server.pid(role), signal.SIGKILL)
    assert found == reference(prompt, 300)


def test_calls_are_ended(server: Serving, stub: Any) -> None:
    """By Abort, and by a client that leaves."""
    call = stub.Generate(asking([5], 4000, stream=True, request_id="long"), metadata=KEY, timeout=LIMIT_S)
    next(call)
    with pytest.raises(grpc.RpcError, match="request_id: long is running"):
        generate(stub, asking([5], 1, request_id="long"))
    stub.Abort(pb.AbortRequest(request_ids=["long", "unknown"]), metadata=KEY)
    *_, last = call
    assert last.complete.finish_reason == "abort"
    call = stub.Generate(asking([5], 4000, stream=True), metadata=KEY, timeout=LIMIT_S)
    next(call)
    call.cancel()
    until(lambda: not stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=KEY).active_requests)
    until(lambda: not stub.GetLoads(pb.GetLoadsRequest(), metadata=KEY).loads[0].num_total_reqs)


def test_refusals_have_their_status(stub: Any) -> None:
    refused = [
        (grpc.StatusCode.INVALID_ARGUMENT, "prompt", asking([1] * 5000, 1)),
        (grpc.StatusCode.INVALID_ARGUMENT, "X-data-parallel-rank", asking([1], 1, data_parallel_rank=9)),
        (grpc.StatusCode.INVALID_ARGUMENT, "media_refs", asking([1], 1, media_refs=pb.MediaRefs())),
    ]
    for code, text, request in refused:
        with pytest.raises(grpc.RpcError) as caught:
            generate(stub, request)
        error: Any = caught.value
        assert error.code() is code, error.details()
        assert text in error.details()
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            list(stub.Generate(asking([1], 1), metadata=metadata))
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            stub.HealthCheck(pb.HealthCheckRequest(), metadata=metadata)


def test_probes_and_tools_find_their_services(server: Serving, stub: Any, channel: Any) -> None:
    """Health needs no key; reflection names what there is."""
    health = health_pb2_grpc.HealthStub(channel)
    serving_now = health_pb2.HealthCheckResponse.SERVING
    for name in ("", NAME):
        asked_of = health_pb2.HealthCheckRequest(service=name)
        until(partial(lambda request: health.Check(request).status == serving_now, asked_of))
    assert stub.HealthCheck(pb.HealthCheckRequest(), metadata=KEY).healthy
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, metadata=KEY)
    assert NAME in [one.name for one in answer.list_services_response.service]


def test_the_server_describes_itself(stub: Any) -> None:
    model = stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=KEY)
    assert (model.max_context_length, model.vocab_size, model.is_generation) == (4096, 49152, True)
    assert stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=KEY).server_type == "vllm-grpc"
    call = stub.Generate(asking([9], 40, stream=True), metadata=KEY, timeout=LIMIT_S)
    next(call)
    assert not stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=KEY).success, "a request runs"
    assert stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=LIMIT_S), metadata=KEY).success
    with pytest.raises(grpc.RpcError, match="--tokenizer FOLDER"):
        list(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), metadata=KEY))
    with pytest.raises(grpc.RpcError, match="--profiler-dir"):
        stub.StartProfile(common_pb2.StartProfileRequest(), metadata=KEY)
    with pytest.raises(grpc.RpcError, match="started without --kv-events-config"):
        list(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), metadata=KEY))


def test_embeddings(stub: Any) -> None:
    """A model for vectors gives them; a model for text says that it has none."""
    asked = pb.EmbedRequest(request_id="one", tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]))
    with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
        stub.Embed(asked, metadata=KEY)
    with (
        serving("--grpc", "--device", "cpu", "--runner", "pooling", "--max-model-len", "64", says="(gRPC)") as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        vectors = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        found = vectors.Embed(asked)
        assert (len(found.embedding), found.embedding_dim, found.prompt_tokens) == (576, 576, 3)
        assert sum(value * value for value in found.embedding) == pytest.approx(1.0, abs=1e-3)
        assert not vectors.GetModelInfo(pb.GetModelInfoRequest()).is_generation
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            vectors.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[60000])))
        with pytest.raises(grpc.RpcError, match="tokenized"):
            vectors.Embed(pb.EmbedRequest())


def test_the_page_of_grpc(server: Serving) -> None:
    """Its program, with this port."""
    page = (Path(__file__).parents[2] / "docs" / "api" / "grpc.md").read_text("utf-8")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S))
    assert program.count("localhost:50051") == 1
    program = program.replace("localhost:50051", f"127.0.0.1:{server.port}")
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd="/", timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("length\nTrue\n")


def test_events_of_the_prefix_cache() -> None:
    """A router hears of all ranks, through the death of a scheduler, until it or the server ends. Its key is an administrator's."""
    events = f'{{"enable_kv_cache_events": true, "endpoint": "tcp://*:{free_ports(2, "127.0.0.1")}"}}'
    flags = ("--device", "fake", "--max-model-len", "512", "-dp", "2", "--kv-events-config", events)
    keys = ("--api-key", "secret", "--admin-api-key", "root", "--drain-timeout", "20")
    with (
        serving("--grpc", *flags, *keys, says="(gRPC)") as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        asked = common_pb2.SubscribeKvEventsRequest()
        with pytest.raises(grpc.RpcError, match="PERMISSION_DENIED"):
            list(stub.SubscribeKvEvents(asked, metadata=KEY))
        call = stub.SubscribeKvEvents(asked, metadata=(("authorization", "Bearer root"),), timeout=LIMIT_S)
        begun = [next(call) for _ in range(2)]
        assert {(one.dp_rank, one.sequence_number) for one in begun} == {(0, 0), (1, 0)}
        assert all(one.events[0].HasField("cleared") for one in begun)
        for rank in (0, 1):
            generate(stub, asking([*range(20)], 4, data_parallel_rank=rank))
            batch = next(call)
            (block,) = batch.events[0].stored.blocks
            assert (batch.dp_rank, batch.sequence_number, list(block.token_ids)) == (rank, 1, [*range(16)])
        (pid,) = [p["pid"] for p in server.status()["processes"] if (p["role"], p["index"]) == ("scheduler", 1)]
        os.kill(pid, signal.SIGKILL)
        again = next(call)
        assert (again.dp_rank, again.sequence_number) == (1, 0)
        assert again.events[0].HasField("cleared")
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert list(call) == [], "it ends in good order"
        assert time.monotonic() - begin < 15, "nobody waits for it"
