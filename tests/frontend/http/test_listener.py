"""The open port over a real socket: TLS, certificates of clients, scopes of keys, and files that change while it serves."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted import Scripted
from waiting import free_port

from meshlm.frontend import listener as listeners
from meshlm.frontend.listener import HttpListener
from meshlm.protocol.config import ServerConfig

LIMIT_S = 10.0
ASK = {"prompt": "hi", "max_tokens": 2}


class Files:
    """An authority, and the certificate of the server."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, trustme.CA()
        self.authority.cert_pem.write_to_path(folder / "ca.pem")
        self.issue()
        (folder / "keys").write_text("one\ntwo admin\n")

    def issue(self) -> None:
        """A new certificate."""
        pem = self.authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem
        new = self.folder / "new.pem"
        pem.write_to_path(new)
        new.replace(self.folder / "cert.pem")

    def client(self) -> ssl.SSLContext:
        """What a client without a certificate of its own trusts."""
        return ssl.create_default_context(cafile=str(self.folder / "ca.pem"))


class Log:
    """What the frontend says of the files that it watches."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[str] = asyncio.Queue()

    def info(self, event: str, **fields: str) -> None:
        self.said.put_nowait(event)

    warning = info

    async def next(self) -> str:
        return await asyncio.wait_for(self.said.get(), LIMIT_S)


AGAIN, NOT_AGAIN = "files read again", "files not read again; those before hold"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    found = Log()
    monkeypatch.setattr(listeners, "_log", found)
    return found


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(listeners, "LOOK_S", 0.01)
    return Files(tmp_path)


@asynccontextmanager
async def serving(files: Files, **more: Any) -> AsyncIterator[str]:
    folder = files.folder
    server = ServerConfig(
        host="127.0.0.1",
        port=free_port(),
        ssl_certfile=str(folder / "cert.pem"),
        api_key_file=str(folder / "keys"),
        **more,
    )
    listener = HttpListener(Scripted(server))
    await listener.start()
    assert listener._server is not None
    for _ in range(1000):  # turns of the loop, in which the server's task begins to listen
        if listener._server.started:
            break
        await asyncio.sleep(0)
    try:
        yield f"https://127.0.0.1:{server.port}"
    finally:
        await listener.stop()


async def answer(url: str, trusted: ssl.SSLContext, key: str = "one", **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(verify=trusted, timeout=LIMIT_S) as client:
        headers = {"Authorization": f"Bearer {key}"}
        return await client.post(f"{url}/v1/completions", content=json.dumps({**ASK, **body}), headers=headers)


async def test_answers_whole_and_streamed(files: Files) -> None:
    async with serving(files) as url:
        whole = await answer(url, files.client())
        assert (whole.status_code, whole.json()["choices"][0]["text"]) == (200, "Hello you")
        streamed = await answer(url, files.client(), stream=True)
        assert streamed.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await answer(url, ssl.create_default_context())
        with pytest.raises(httpx.RemoteProtocolError):
            await answer(url.replace("https", "http"), files.client())


async def test_a_refusal_before_the_body_has_come(files: Files) -> None:
    """The connection is not closed under a client that still sends."""
    async with serving(files, max_body_bytes=1024) as url:
        found = await answer(url, files.client(), prompt="x" * 3_000_000)
        assert found.status_code == 413


async def test_clients_need_a_certificate(files: Files) -> None:
    async with serving(files, ssl_ca_certs=str(files.folder / "ca.pem"), ssl_cert_reqs=2) as url:
        with pytest.raises(httpx.TransportError):
            await answer(url, files.client())
        own = files.client()
        files.authority.issue_cert("client").configure_cert(own)
        assert (await answer(url, own)).status_code == 200


async def test_scopes(files: Files) -> None:
    async with serving(files) as url, httpx.AsyncClient(verify=files.client(), timeout=LIMIT_S) as client:

        async def status(method: str, path: str, key: str) -> int:
            body = json.dumps(ASK) if path == "/v1/completions" else None
            headers = {"X-Api-Key": key}
            return (await client.request(method, url + path, headers=headers, content=body)).status_code

        assert [await status("POST", "/v1/completions", key) for key in ("one", "two", "three")] == [200, 403, 401]
        assert [await status("POST", "/start_profile", key) for key in ("one", "two", "three")] == [403, 404, 401]
        assert [await status("GET", "/version", key) for key in ("one", "two", "three")] == [200, 200, 401]
        assert [await status("GET", "/health", key) for key in ("one", "three")] == [200, 200]
        refused = await answer(url, files.client(), "two")
        assert (
            refused.json()["error"]["message"]
            == "Forbidden: this key is not for inference (--api-key-file, --admin-api-key)"
        )


def replaced(path: Path, text: str) -> None:
    """In one step, as those who look meanwhile would read half of it."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


async def test_keys_change_while_it_serves(files: Files, log: Log) -> None:
    async with serving(files) as url:
        assert (await answer(url, files.client(), "new")).status_code == 401
        replaced(files.folder / "keys", "new # instead of one\n")
        assert await log.next() == AGAIN
        assert (await answer(url, files.client(), "new")).status_code == 200
        assert (await answer(url, files.client(), "one")).status_code == 401
        (files.folder / "keys").unlink()
        assert await log.next() == NOT_AGAIN
        assert (await answer(url, files.client(), "new")).status_code == 200, "what held before goes on to hold"


async def certificate(url: str, files: Files) -> bytes:
    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), ssl=files.client())
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return bytes(found)


async def test_certificates_change_while_it_serves(files: Files, log: Log) -> None:
    async with serving(files, enable_ssl_refresh=True) as url:
        before = await certificate(url, files)
        files.issue()
        assert await log.next() == AGAIN
        assert (after := await certificate(url, files)) != before
        replaced(files.folder / "cert.pem", "nothing")
        assert await log.next() == NOT_AGAIN
        assert await certificate(url, files) == after
        assert (await answer(url, files.client())).status_code == 200


async def test_each_key_has_a_prefix_cache_of_its_own_by_grpc_too(files: Files) -> None:
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    from meshlm.frontend.grpc.listener import GrpcListener

    server = ServerConfig(host="127.0.0.1", port=free_port(), grpc=True, api_key=("one", "two"))
    backend: Any = Scripted(server)
    listener = GrpcListener(backend)
    await listener.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            asked = pb.GenerateRequest(
                tokenized=pb.TokenizedInput(input_ids=[5, 6]), sampling_params=pb.SamplingParams(max_tokens=2)
            )

            def call(key: str) -> Any:
                return stub.Generate(asked, metadata=(("authorization", f"Bearer {key}"),), timeout=LIMIT_S)

            for key in ("one", "two", "one"):
                assert [message async for message in call(key)]
            for key in ("three", ""):
                with pytest.raises(grpc.aio.AioRpcError, match="send a valid key"):
                    await anext(aiter(call(key)))
    finally:
        await listener.stop()
    first, other, again = (submit.cache_salt for submit in backend.submits)
    assert first == again != other


async def test_grpc_speaks_tls(files: Files) -> None:
    from meshlm.frontend.grpc.listener import GrpcListener

    port, folder = free_port(), files.folder
    server = ServerConfig(host="127.0.0.1", port=port, grpc=True, ssl_certfile=str(folder / "cert.pem"))
    backend: Any = Scripted(server)
    listener = GrpcListener(backend)
    await listener.start()
    try:
        trusted = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            found = await stub.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
            assert found.status == health_pb2.HealthCheckResponse.SERVING
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
    finally:
        await listener.stop()


async def test_certificates_of_grpc_change_while_it_serves(files: Files, log: Log) -> None:
    from meshlm.frontend.grpc.listener import GrpcListener

    port, cert = free_port(), files.folder / "cert.pem"
    server = ServerConfig(host="127.0.0.1", port=port, grpc=True, ssl_certfile=str(cert), enable_ssl_refresh=True)
    backend: Any = Scripted(server)
    listener = GrpcListener(backend)
    await listener.start()
    try:
        url = f"https://127.0.0.1:{port}"
        before = await certificate(url, files)
        assert await certificate(url, files) == before
        trusted = grpc.ssl_channel_credentials((files.folder / "ca.pem").read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
            files.issue()
            assert await log.next() == AGAIN
            assert (after := await certificate(url, files)) != before
            replaced(cert, "nothing")
            assert await log.next() == NOT_AGAIN
            assert await certificate(url, files) == after
            found = await stub.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
            assert found.status == health_pb2.HealthCheckResponse.SERVING, "open connections go on"
    finally:
        await listener.stop()
