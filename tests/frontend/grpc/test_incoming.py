"""Messages are read once their call is let in, within a budget, and counted before they are decoded."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from scripted import Scripted
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from waiting import free_port

from meshlm.frontend.grpc import listener as incoming
from meshlm.frontend.grpc.listener import FREE_BYTES, METHODS, GrpcListener, Incoming, check_fields
from meshlm.frontend.http.errors import HttpError
from meshlm.protocol.config import ServerConfig

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
KIND = METHODS[GENERATE]
LIMIT_S = 20.0
MB = 1 << 20
SENDER = """
import grpc, sys
port, key, size = sys.argv[1:]
body = b"\\x0a" + b"x" * int(size)  # of no message: it is refused before that is seen
options = [("grpc.use_local_subchannel_pool", 1)]
channels = [grpc.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(8)]
asked = [
    channel.unary_stream("METHOD")(body, metadata=(("authorization", f"Bearer {key}"),), timeout=60) for channel in channels
]
for call in asked:
    print(call.code())
""".replace("METHOD", GENERATE)


def resident_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // MB


@asynccontextmanager
async def serving(**server: Any) -> AsyncIterator[tuple[Any, int]]:
    port = free_port()
    backend: Any = Scripted(ServerConfig(responses_store="off", host="127.0.0.1", port=port, grpc=True, **server))
    listener = GrpcListener(backend)
    await listener.start()
    try:
        yield backend, port
    finally:
        await listener.stop()


@asynccontextmanager
async def calling(port: int) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


async def test_of_a_wrong_key_no_message_is_read() -> None:
    """Eight messages of 30 MB took 2.8 GB: they were decoded before the key was looked at."""
    async with serving(api_key=("right",)) as (_, port):
        before = most = resident_mb()
        sender = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SENDER, str(port), "wrong", str(30 * MB)), stdout=asyncio.subprocess.PIPE
        )
        output = asyncio.create_task(sender.communicate())
        async with asyncio.timeout(60):
            while not output.done():
                await asyncio.wait({output}, timeout=0.005)
                most = max(most, resident_mb())
    assert output.result()[0].decode().split() == ["StatusCode.UNAUTHENTICATED"] * 8
    assert most - before < 60


async def test_calls_of_all_kinds_go_on_as_before() -> None:
    async with serving() as (backend, port), calling(port) as stub:
        asked = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5, 6]), stream=True)
        found = [message async for message in stub.Generate(asked, timeout=LIMIT_S)]
        assert [message.WhichOneof("response") for message in found][-1] == "complete"
        info = await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=LIMIT_S)
        assert info.vocab_size == backend.resolved.spec.vocab_size


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "this is no message of this method"),
        (b"\xff" * 300_000, grpc.StatusCode.INVALID_ARGUMENT, "this is no message of this method"),
        (b"\x32\x04\x8a\x01\x01a" * 200_000, grpc.StatusCode.INVALID_ARGUMENT, "131072 fields"),
        (b"\x0a\x00" * 4_000_000, grpc.StatusCode.UNAVAILABLE, "--max-incoming-bytes"),
    ],
    ids=["short", "long", "many", "large"],
)
async def test_what_is_wrong_with_a_message_is_said(body: bytes, code: grpc.StatusCode, text: str) -> None:
    async with serving(max_incoming_bytes=4 * MB) as (backend, port):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError, match=text) as refused:
                async for _ in channel.unary_stream(GENERATE)(body, timeout=LIMIT_S):
                    pass
        assert refused.value.code() is code
        assert not backend.submits


async def test_a_message_to_another_service_is_small() -> None:
    async with serving() as (_, port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(
                b"\x0a\x80\x80\x08" + b"x" * 131_072, timeout=LIMIT_S
            )
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class Call:
    """A call whose message comes when the test says so."""

    def __init__(self) -> None:
        self.message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def read(self) -> bytes:
        return await self.message


@pytest.fixture
def without_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "GRACE_S", 0.0)


@pytest.mark.usefixtures("without_grace")
async def test_messages_that_are_late_count_as_the_longest() -> None:
    reads = Incoming(ServerConfig(max_body_bytes=MB, max_incoming_bytes=2 * MB))
    calls = [Call() for _ in range(3)]

    async def take(call: Any) -> bytes | None:
        async with reads._raw(call) as raw:
            return raw

    first, second = (asyncio.ensure_future(take(call)) for call in calls[:2])
    while reads._budget.num_bytes < 2 * (MB - FREE_BYTES):  # noqa: ASYNC110
        await asyncio.sleep(0)
    with pytest.raises(HttpError, match="--max-incoming-bytes"):
        await take(calls[2])
    calls[0].message.set_result(b"x" * 100)
    assert await first == b"x" * 100
    second.cancel()
    await asyncio.wait({second})
    assert reads._budget.num_bytes == 0


@pytest.mark.usefixtures("without_grace")
async def test_a_message_that_does_not_come() -> None:
    reads, call = Incoming(ServerConfig(http_body_timeout=0.01)), Call()
    with pytest.raises(HttpError, match="did not come") as refused:
        async with reads._raw(call):
            raise AssertionError
    assert (refused.value.status, reads._budget.num_bytes) == (408, 0)


async def test_bytes_count_until_they_are_decoded() -> None:
    reads, call = Incoming(ServerConfig()), Call()
    call.message.set_result(b"x" * MB)
    async with reads._raw(call):
        assert reads._budget.num_bytes == MB - FREE_BYTES
    assert reads._budget.num_bytes == 0


def fields_of(message: Any) -> int:
    """The least limit that the message keeps within."""
    raw = message.SerializeToString()
    for most in range(1000):
        try:
            check_fields(raw, KIND, most)
        except HttpError:
            continue
        return most
    raise AssertionError


def test_fields_are_counted_wherever_they_are() -> None:
    assert fields_of(pb.GenerateRequest()) == 0
    assert fields_of(pb.GenerateRequest(text="a", stream=True)) == 2
    assert fields_of(pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=range(900)))) == 2, "a packed list is one"
    params = pb.SamplingParams(stop=["", "", ""], logit_bias={1: 2.0, 3: 4.0}, temperature=0.5)
    assert fields_of(pb.GenerateRequest(sampling_params=params)) == 1 + 3 + 2 * 3 + 1


@pytest.mark.parametrize("raw", [b"\x80", b"\xff" * 11, b"\x0b", b"\x07"])
def test_what_is_no_message_is_no_endless_search(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        check_fields(raw, KIND)


def test_a_length_beyond_the_end_is_the_decoders_to_refuse() -> None:
    raw = b"\x32\xff\xff\xff\x7f" + b"\x22\xff\x01"
    check_fields(raw, KIND)
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(raw)


def test_the_message_of_every_method_is_known() -> None:
    assert SimpleNamespace(**{kind.name: 0 for kind in METHODS.values()}).GenerateRequest == 0
    assert len(METHODS) == len(pb.DESCRIPTOR.services_by_name["VllmEngine"].methods)
