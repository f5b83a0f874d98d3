"""Streaming completions for chaos.py and soak.py: what is asked, one client's view of an answer, and its verdict.

The client is what a careful client of MeshLM is: when its connection breaks it asks again with the same Idempotency-Key, and
with the id of the last event it has read as Last-Event-ID.
"""

import asyncio
import json
import random
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TEXT = (
    "the quick brown fox jumps over a lazy dog while seven wizards count their coins in an old tower by the sea and "
    "nobody in the small town below knows why the lamps burn all night or who pays for the oil that keeps them alight"
)
WORDS = TEXT.split()
RETRY_S = 0.05
READ_LIMIT_S = 120.0  # without an event: the stream is taken for lost


class Ask(NamedTuple):
    """One request of the mix."""

    number: int
    body: dict[str, Any]


def draw_asks(count: int, seed: int, tokens: tuple[int, int], device: str, longer: int = 0) -> list[Ask]:
    """Greedy and seeded ones, of different prompts and lengths, some with stop strings; on a GPU they are as long as they may be.
    longer: tokens, about, that each prompt has beyond a few."""
    dice = random.Random(seed)
    asks = [Ask(number, _body(dice, number, tokens, device != "cpu", longer)) for number in range(count)]
    if device == "cuda":
        for ask in asks:
            ask.body["ignore_eos"] = True
            ask.body.pop("stop", None)
    return asks


def _body(dice: random.Random, number: int, tokens: tuple[int, int], as_ids: bool, longer: int) -> dict[str, Any]:
    length = dice.randint(4, 60 if as_ids else 20) + longer
    prompt: Any = " ".join(["Once", "upon", "a", "time"] * (number % 3 == 0) + dice.choices(WORDS, k=length))
    if as_ids:
        prompt = [300] * 20 * (number % 3 == 0) + [dice.randrange(300, 40_000) for _ in range(length)]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": dice.randint(*tokens), "stream": True}
    body |= {"return_token_ids": True, "ignore_eos": number % 4 != 1}
    body |= {"temperature": 0} if number % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": dice.randrange(1 << 40)}
    if number % 5 == 2:
        body["stop"] = dice.sample(["zz", "qx", "vex", " the", "\n\n", ".", "ing"], k=3)
    return body


class Answer(NamedTuple):
    """What a client has in the end."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    error: str


class Gap(NamedTuple):
    """Two tokens of one stream that follow each other, in seconds of time.monotonic()."""

    begin: float
    end: float


@dataclass(slots=True, eq=False)
class Stream:
    """One request, over as many connections as it takes. `aborts_after` tokens it hangs up (-1: never)."""

    port: int
    ask: Ask
    aborts_after: int = -1
    keyed: bool = True
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str = ""
    retries: int = 0
    refusals: int = 0
    longest_s: float = 0.0
    gaps: list[Gap] = field(default_factory=list)  # those longer than `keep_gap_s`
    keep_gap_s: float = 0.04
    last_at: float = 0.0
    left: bool = False
    _key: str = field(default_factory=lambda: uuid.uuid4().hex)
    _last_id: str = ""
    _done: bool = False

    async def run(self) -> Answer:
        """Until [DONE], an error, or READ_LIMIT_S without news."""
        quiet_since = time.monotonic()
        while not (self._done or self.left):
            have = len(self.token_ids)
            try:
                await self._connection()
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                if self.token_ids and not self._last_id:
                    self.error = f"the connection broke and the events have no ids: {error}"
                    break
            except TimeoutError:
                self.error = f"no event for {READ_LIMIT_S:.0f} s"
                break
            if self._done or self.left:
                break
            self.retries += 1
            if len(self.token_ids) > have:
                quiet_since = time.monotonic()
            if time.monotonic() - quiet_since > READ_LIMIT_S:
                self.error = f"no event for {READ_LIMIT_S:.0f} s"
                break
            await asyncio.sleep(RETRY_S)
        return Answer(tuple(self.token_ids), self.text, self.finish_reason, self.error)

    async def _connection(self) -> None:
        """One try. OSError, IncompleteReadError or ValueError when the connection breaks."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        try:
            writer.write(self._request())
            async with asyncio.timeout(READ_LIMIT_S):
                status, length = await self._head(reader)
            if status != 200:
                await self._refused(status, await reader.readexactly(length))
                return
            await self._events(reader)
        finally:
            writer.close()

    def _request(self) -> bytes:
        body = json.dumps(self.ask.body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        )
        head += "Content-Type: application/json\r\n"
        if self.keyed:
            head += f"Idempotency-Key: {self._key}\r\n"
        if self._last_id:
            head += f"Last-Event-ID: {self._last_id}\r\n"
        return head.encode() + b"\r\n" + body

    async def _head(self, reader: asyncio.StreamReader) -> tuple[int, int]:
        """Status and content length (0: chunked)."""
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        length = 0
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return status, length

    async def _refused(self, status: int, body: bytes) -> None:
        """503 says: try again. Anything else is the end."""
        if status == 503:
            self.refusals += 1
            await asyncio.sleep(0.2)
            return
        self.error, self._done = f"HTTP {status}: {body.decode('utf-8', 'replace')[:300]}", True

    async def _events(self, reader: asyncio.StreamReader) -> None:
        buffer = b""
        while not (self._done or self.left):
            async with asyncio.timeout(READ_LIMIT_S):
                size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
                buffer += (await reader.readexactly(size + 2))[:-2]
            if not size:
                raise ValueError("the answer ended without [DONE]")
            *events, buffer = buffer.split(b"\n\n")
            for event in events:
                self._event(event.decode())

    def _event(self, event: str) -> None:
        data = ""
        for line in event.splitlines():
            name, _, value = line.partition(": ")
            if name == "id":
                self._last_id = value
            elif name == "data":
                data = value
        if data == "[DONE]":
            self._done = True
        elif data:
            self._chunk(json.loads(data))

    def _chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = str(chunk["error"].get("message"))
            return
        for choice in chunk["choices"]:
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if new := choice["token_ids"]:
                self._arrived(new)

    def _arrived(self, new: list[int]) -> None:
        now = time.monotonic()
        if self.last_at:
            self.longest_s = max(self.longest_s, now - self.last_at)
            if now - self.last_at > self.keep_gap_s:
                self.gaps.append(Gap(self.last_at, now))
        self.last_at = now
        self.token_ids += new
        if 0 <= self.aborts_after <= len(self.token_ids):
            self.left = True


def verdict(got: Answer, wanted: Answer) -> str:
    """ "right", "error", "lost" (tokens are missing), "duplicated" (some came twice) or "wrong" (others came)."""
    if got == wanted:
        return "right"
    if got.error:
        return "error"
    mine, theirs = got.token_ids, wanted.token_ids
    if len(mine) < len(theirs) and _without_a_run(theirs, mine):
        return "lost"
    if len(mine) > len(theirs) and _without_a_run(mine, theirs):
        return "duplicated"
    return "wrong"


def counted(got: Answer, wanted: Answer) -> str:
    """The same by the number of tokens alone."""
    mine, theirs = len(got.token_ids), len(wanted.token_ids)
    if got.error:
        return "error"
    return "right" if mine == theirs else "lost" if mine < theirs else "duplicated"


def num_equal(mine: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """Tokens before the first that differs."""
    return next((at for at, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))


def _without_a_run(longer: tuple[int, ...], shorter: tuple[int, ...]) -> bool:
    """Whether `shorter` is `longer` with one run of tokens left out."""
    same = 0
    while same < len(shorter) and longer[same] == shorter[same]:
        same += 1
    rest = len(shorter) - same
    return rest == 0 or longer[-rest:] == shorter[-rest:]
