"""One measured request after another to an OpenAI-style server: bare HTTP/1.1 streams, so that the client costs as little as it can of
the host it shares with the server. Used by serve.py."""

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from meshlm.supervisor.bench.data import Sample
from meshlm.supervisor.bench.metrics import Measured

LONGEST_EVENT = 1 << 24


class Target(NamedTuple):
    """The server, and what every request to it says."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    endpoint: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]  # beside prompt and length
    is_chat: bool

    async def measured(self, sample: Sample, request_id: str) -> Measured:
        """An error is a result too."""
        measured = Measured(start=time.perf_counter(), prompt_len=sample.prompt_len)
        try:
            await self._send(sample, request_id, measured)
        except (OSError, asyncio.IncompleteReadError, ValueError, LookupError, TypeError) as error:
            measured.error = str(error) or type(error).__name__
        return measured

    async def _send(self, sample: Sample, request_id: str, measured: Measured) -> None:
        given: Any = [{"role": "user", "content": sample.prompt}] if self.is_chat else sample.prompt
        body = {("messages" if self.is_chat else "prompt"): given, "max_tokens": sample.output_len, **self.body}
        data = json.dumps(body).encode()
        last = measured.start
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=LONGEST_EVENT, ssl=self.tls)
        try:
            headers = {
                "Host": self.host,
                "Content-Type": "application/json",
                "X-Request-Id": request_id,
                **self.headers,
            }
            lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
            head = f"POST {self.endpoint} HTTP/1.1\r\n{''.join(lines)}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            if b" 200 " not in await reader.readline():
                raise ValueError(_message((await reader.read()).partition(b"\r\n\r\n")[2]))
            texts = []
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(_message(line[6:]))
                if event.get("usage"):
                    measured.output_len = event["usage"]["completion_tokens"]
                for choice in event.get("choices") or []:
                    texts.append((choice["delta"].get("content") if self.is_chat else choice["text"]) or "")
                    if not measured.ttft:
                        measured.ttft = now - measured.start
                    else:
                        measured.itl.append(now - last)
                    last = now
        finally:
            writer.close()
        if not measured.ttft:
            raise ValueError("the answer has no event with a choice")
        measured.output_len = measured.output_len or len(measured.itl) + 1  # a server without usage: a token an event
        measured.text, measured.latency = "".join(texts), last - measured.start
        measured.ok = True


def _message(body: bytes) -> str:
    """The server's words for what is wrong; its answer may have a chunk's size before it."""
    begin, end = body.find(b"{"), body.rfind(b"}")
    try:
        return str(json.loads(body[begin : end + 1])["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[-300:]
