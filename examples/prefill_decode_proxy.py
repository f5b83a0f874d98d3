"""A proxy before meshes that compute prompts and meshes that decode.

    python examples/prefill_decode_proxy.py --prefill http://HOST:PORT --decode http://HOST:PORT [--port 8192]
    python examples/prefill_decode_proxy.py --pings 30001 [--port 8192]

A request goes to a prefill mesh for one token, and with the kv_transfer_params of that answer to a decode mesh, whose answer the
client gets. With --pings the meshes say themselves that they are there (P2pNcclConnector), and the request's id carries both addresses;
one that has said nothing for ten seconds is left out. When the prefill mesh fails, the decode mesh computes the prompt itself.
"""

import argparse
import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import uvicorn
import zmq
import zmq.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

SILENT_S = 10.0
PATHS = ("/v1/completions", "/v1/chat/completions")
ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0, "stream": False}
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
WHERE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


@dataclass
class Meshes:
    """Those of one kind: their URLs, and of those that ping the addresses for KV and the time of the last ping."""

    addresses: dict[str, str] = field(default_factory=dict)
    heard_at: dict[str, float] = field(default_factory=dict)
    turn: "itertools.count[int]" = field(default_factory=itertools.count)

    def heard(self, url: str, address: str) -> None:
        self.addresses[url], self.heard_at[url] = address, time.monotonic()

    def choose(self) -> str:
        """The URL of one, in turn. LookupError where there is none."""
        since = time.monotonic() - SILENT_S
        there = [url for url in self.addresses if self.heard_at.get(url, since) >= since]
        if not there:
            raise LookupError
        return there[next(self.turn) % len(there)]


class Proxy:
    """`by_id`: addresses travel in request ids; else in kv_transfer_params."""

    def __init__(self, prefill: Meshes, decode: Meshes, *, by_id: bool) -> None:
        self.prefill, self.decode, self._by_id = prefill, decode, by_id
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0))

    async def answer(self, request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        try:
            prefill, decode = self.prefill.choose(), self.decode.choose()
        except LookupError:
            return JSONResponse({"error": {"message": "no mesh is there", "type": "overloaded_error"}}, 503)
        headers = {name: value for name, value in request.headers.items() if name == "authorization"}
        headers["x-request-id"] = self._name(prefill, decode)
        params = await self._prefilled(prefill + request.url.path, body, headers)
        if params is not None:
            body = {**body, "kv_transfer_params": params}
        asked = self._client.build_request("POST", decode + request.url.path, json=body, headers=headers)
        answer = await self._client.send(asked, stream=True)
        kind = answer.headers.get("content-type", "application/json")
        return StreamingResponse(_relayed(answer), answer.status_code, media_type=kind)

    def _name(self, prefill: str, decode: str) -> str:
        name = uuid.uuid4().hex
        if not self._by_id:
            return name
        there = self.prefill.addresses[prefill], self.decode.addresses[decode]
        return f"___prefill_addr_{there[0]}___decode_addr_{there[1]}_{name}"

    async def _prefilled(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any] | None:
        """The kv_transfer_params for the decode mesh; None where the prompt has to be computed there, or its id says all."""
        wanted = {name: value for name, value in ONE_TOKEN.items() if name in body or name in ("max_tokens", "stream")}
        asked = {name: value for name, value in body.items() if name != "stream_options"} | wanted
        if not self._by_id:
            asked["kv_transfer_params"] = {**ASK, **dict.fromkeys(WHERE)}
        try:
            answer = await self._client.post(url, json=asked, headers=headers)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            print(f"{url}: {error}; the prompt is computed by the decode mesh")
            return None
        found: dict[str, Any] | None = answer.json().get("kv_transfer_params")
        return found

    async def hear(self, port: int) -> None:
        """Meshes that ping, for ever."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(f"tcp://0.0.0.0:{port}")
        while True:
            *_, said = await socket.recv_multipart()
            ping = msgspec.msgpack.decode(said)
            kind = self.prefill if ping["type"] == "P" else self.decode
            kind.heard(f"http://{ping['http_address']}", ping["zmq_address"])

    def there(self, _: Request) -> Response:
        """The meshes that are known."""
        return JSONResponse({"prefill": list(self.prefill.addresses), "decode": list(self.decode.addresses)})


async def _relayed(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx.HTTPError as error:  # the decode mesh is gone for good; a mesh whose processes die goes on
        yield b"data: " + json.dumps({"error": {"message": str(error), "type": "internal_error"}}).encode() + b"\n\n"
    finally:
        await answer.aclose()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", action="append", default=[], help="URL of a mesh that computes prompts")
    parser.add_argument("--decode", action="append", default=[], help="URL of a mesh that decodes")
    parser.add_argument("--pings", type=int, help="port for meshes that say themselves that they are there")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8192)
    given = parser.parse_args()
    proxy = Proxy(
        Meshes(dict.fromkeys(given.prefill, "")), Meshes(dict.fromkeys(given.decode, "")), by_id=given.pings is not None
    )
    routes = [Route(path, proxy.answer, methods=["POST"]) for path in PATHS]
    app = Starlette(routes=[*routes, Route("/meshes", proxy.there)])
    server = uvicorn.Server(uvicorn.Config(app, host=given.host, port=given.port, log_level="warning"))
    hearing = asyncio.ensure_future(proxy.hear(given.pings)) if given.pings is not None else None
    await server.serve()
    if hearing is not None:
        hearing.cancel()


if __name__ == "__main__":
    asyncio.run(main())
