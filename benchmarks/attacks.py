"""What a hostile client does to a mesh: one function per attack, each repeated for some seconds. Started by attacked.py.

    python -P benchmarks/attacks.py NAME PORT VOCAB MAX_MODEL_LEN SECONDS

A process of its own, so that its work does not delay the clients that measure (it still takes from the same processors). It prints one
JSON object: what the attack's requests were answered, by status.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

READ_LIMIT_S = 30.0
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


class Target:
    """The mesh under attack; `answers` counts statuses, 0 where the connection ended without one."""

    def __init__(self, port: int, vocab_size: int, max_model_len: int, seconds: float) -> None:
        self.port, self.vocab_size, self.max_model_len = port, vocab_size, max_model_len
        self.until = asyncio.get_running_loop().time() + seconds
        self.answers: Counter[str] = Counter()
        self.dice = random.Random(0)

    @property
    def goes_on(self) -> bool:
        return asyncio.get_running_loop().time() < self.until

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)

    async def post(self, path: str, body: bytes, *headers: str, read: int = -1) -> bytes:
        """One request; what came first of its answer (all of it: `read` -1). `read` 0: leave without waiting."""
        named = {header.partition(":")[0] for header in headers}
        usual = ("Host: localhost", "Connection: close", "Content-Type: application/json")
        own = (header for header in usual if header.partition(":")[0] not in named)
        lines = (f"POST {path} HTTP/1.1", *own, f"Content-Length: {len(body)}", *headers)
        data = b""
        try:
            reader, writer = await self.connect()
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            await writer.drain()
            if read:
                async with asyncio.timeout(READ_LIMIT_S):
                    data = await reader.read(read)
                    while read < 0 and (more := await reader.read(1 << 20)):
                        data += more
            writer.close()
        except OSError:
            pass
        except TimeoutError:
            writer.transport.abort()
            self.answers["no answer"] += 1
            return data
        self.answers[data[9:12].decode("latin-1") if data else "left" if not read else "closed"] += 1
        return data

    async def repeat(self, attack: Callable[[], Awaitable[object]], clients: int = 3, pause_s: float = 0.0) -> None:
        """Several clients in loops."""

        async def client() -> None:
            while self.goes_on:
                await attack()
                await asyncio.sleep(pause_s)

        await asyncio.gather(*(client() for _ in range(clients)))


def encoded(**body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


# --- messages that no frame holds ---


async def detokenize_many_ids(to: Target) -> None:
    body = encoded(tokens=[7] * 869_000)
    await to.repeat(lambda: to.post("/detokenize", body))


async def bias_for_many_prompts(to: Target) -> None:
    bias = {str(token): 1.0 for token in range(to.vocab_size)}
    body = encoded(prompt=["x"] * 512, logit_bias=bias, max_tokens=2)
    await to.repeat(lambda: to.post("/v1/completions", body))


async def allowed_ids_for_many_choices(to: Target) -> None:
    ids = [token % to.vocab_size for token in range(1_300_000)]
    body = encoded(prompt="x", n=64, allowed_token_ids=ids, max_tokens=2)
    await to.repeat(lambda: to.post("/v1/completions", body))


async def prompt_logprobs(to: Target) -> None:
    prompt = [300 + place % 1000 for place in range(to.max_model_len - 8)]
    body = encoded(prompt=prompt[: (1 << 18) // 21], prompt_logprobs=20, max_tokens=2)
    await to.repeat(lambda: to.post("/v1/completions", body))


async def keyed_streams_that_reconnect(to: Target) -> None:
    """With log-probabilities, of many choices: each connection gets everything again."""
    tokens = min(1000, to.max_model_len // 2)
    body = encoded(prompt="x", n=60, logprobs=20, max_tokens=tokens, ignore_eos=True, stream=True)

    async def attack() -> None:
        key = f"Idempotency-Key: {to.dice.random()}"
        for _ in range(4):
            await to.post("/v1/completions", body, key, read=1 << 20)

    await to.repeat(attack, clients=2)


# --- heads ---


async def pipelined_heads(to: Target) -> None:
    heads = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000

    async def attack() -> None:
        try:
            reader, writer = await to.connect()
            writer.write(heads)
            async with asyncio.timeout(READ_LIMIT_S):
                while await reader.read(1 << 20):
                    if not to.goes_on:
                        break
            writer.close()
        except (OSError, TimeoutError):
            pass
        to.answers["closed"] += 1

    await to.repeat(attack, clients=2)


# --- small bodies, much memory ---


async def many_prompts_times_choices(to: Target) -> None:
    """4,000 sequences of a body of 0.2 MB, of a client that leaves."""
    body = encoded(prompt=["word " * 1200] * 32, n=125, max_tokens=2)
    await to.repeat(lambda: to.post("/v1/completions", body), clients=3)


async def tokenize_long_texts(to: Target) -> None:
    large = encoded(prompt=" ".join(str(number) for number in range(2_500_000)))
    most = encoded(prompt=" ".join(str(number * 7919) for number in range(100_000)))
    await to.repeat(lambda: to.post("/tokenize", to.dice.choice((large, most))))


async def abandoned_questions(to: Target) -> None:
    body = encoded(prompt=" ".join(str(number * 7919) for number in range(100_000)))
    await to.repeat(lambda: to.post("/tokenize", body, read=0), clients=8, pause_s=0.2)


# --- parsing, slow clients ---


async def many_ids(to: Target) -> None:
    body = encoded(prompt=[7] * 2_500_000)
    await to.repeat(lambda: to.post("/v1/completions", body))


async def empty_lists(to: Target) -> None:
    body = b'{"prompt": [' + b"[]," * 10_000_000 + b"[]]}"
    await to.repeat(lambda: to.post("/v1/completions", body), clients=2)


async def long_unknown_fields(to: Target) -> None:
    async def attack() -> None:
        names = {f"\x1b[2J{to.dice.random()}" + "x" * 100_000: 1 for _ in range(50)}
        await to.post("/v1/completions", json.dumps({"prompt": [5], "max_tokens": 1, **names}).encode())

    await to.repeat(attack)


async def slow_readers(to: Target) -> None:
    """Streams of many choices that nobody reads."""
    body = encoded(prompt="x", n=64, max_tokens=min(1000, to.max_model_len // 2), ignore_eos=True, stream=True)
    await _held(to, HEAD % len(body) + body, 16, reads=False)


async def unfinished_bodies(to: Target) -> None:
    await _held(to, HEAD % (30 << 20) + b" " * (29 << 20), 40)


async def unfinished_heads(to: Target) -> None:
    await _held(to, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 30_000, 400)


# --- a browser on this host, and a page of elsewhere ---


async def cross_site_page(to: Target) -> None:
    """What a page may send unasked, and what it would send by a name of its own that leads here: all of it is refused."""
    ask = encoded(prompt="x", n=64, max_tokens=min(1000, to.max_model_len // 2), ignore_eos=True)
    settings = encoded(max_concurrent_requests=1)
    from_page = ("Origin: https://evil.example", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors")
    rebound = ("Host: evil.example", "Origin: http://evil.example", "Sec-Fetch-Site: same-origin")
    tries = [
        *((path, body, from_page) for path, body in (("/v1/completions", ask), ("/settings", settings))),
        ("/v1/completions", ask, ("Content-Type: text/plain", *from_page)),
        ("/v1/completions", ask, ("Content-Type: text/plain",)),  # of a browser that says nothing of itself
        ("/v1/completions", ask, rebound),
        ("/settings", settings, ()),
    ]

    async def attack() -> None:
        path, body, headers = to.dice.choice(tries)
        await to.post(path, body, *headers)

    await to.repeat(attack)


# --- grammars that a library dies of, or is busy with ---


async def grammars_that_overflow(to: Target) -> None:
    """Each another one, so that nothing is remembered."""

    def chain(length: int) -> bytes:
        name = f"n{to.dice.random()}"
        links = {
            f"d{n}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/d{n + 1}"}}, "required": [name]}
            for n in range(length)
        }
        schema = {"$defs": {**links, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}
        return encoded(prompt="x", max_tokens=2, structured_outputs={"json": schema})

    def rules(length: int) -> bytes:
        name = f"r{to.dice.randrange(1 << 30)}_"
        lines = [f"{name}{n}: {name}{n + 1}" for n in range(length)]
        grammar = "\n".join([f"start: {name}0", *lines, f'{name}{length}: "a"'])
        return encoded(prompt="x", max_tokens=2, structured_outputs={"grammar": grammar})

    async def attack() -> None:
        await to.post("/v1/completions", to.dice.choice((chain(1_000), chain(1_200), rules(6_000))))

    await to.repeat(attack)


async def grammars_that_take_long(to: Target) -> None:
    async def attack() -> None:
        schema = {"type": "integer", "multipleOf": 999_983 + 2 * to.dice.randrange(1 << 16)}
        await to.post("/v1/completions", encoded(prompt="x", max_tokens=2, structured_outputs={"json": schema}))

    await to.repeat(attack, clients=8)


async def grammars_with_costly_masks(to: Target) -> None:
    """They compile, and each token's mask takes as long as the limits allow. The last one has ever more readings of its text."""
    patterns = ("((a{1,1000}){1,1000}){1,1000}", "(a?){1,1000}(a{1,1000}|b){1,1000}", "(a|b)*a(a|b){20}c")
    ambiguous = 'start: e\ne: e e | "a" | "aa" | "aaa" | "b"'

    async def attack() -> None:
        given = to.dice.choice(({"regex": to.dice.choice(patterns)}, {"grammar": ambiguous}))
        await to.post(
            "/v1/completions", encoded(prompt="x", max_tokens=200, structured_outputs=given, n=8, temperature=1)
        )

    await to.repeat(attack)


# --- requests that kill whoever has them in hand: attacked.py gives the mesh the bug (tests/mesh/support/poison_plugin.py) ---


async def poison_requests(to: Target) -> None:
    """One for a detokenizer, one for a worker: each is refused after its second death, or its third in company."""
    for process in (1, 5):  # of poison_plugin.KILLS
        await to.post("/v1/completions", encoded(prompt=[777, process, to.dice.randrange(100)], max_tokens=2))


async def _held(to: Target, data: bytes, count: int, *, reads: bool = True) -> None:
    """Connections that stay open as they are; one that the server closes is opened anew."""

    async def hold() -> None:
        while to.goes_on:
            try:
                reader, writer = await to.connect()
                if not reads:
                    writer.transport.pause_reading()  # type: ignore[attr-defined]
                async with asyncio.timeout_at(to.until):
                    writer.write(data)
                    await writer.drain()
                    await (reader.read() if reads else asyncio.Event().wait())
                to.answers["closed by the server"] += 1
            except TimeoutError:
                to.answers["held"] += 1
                writer.transport.abort()
            except OSError:
                to.answers["closed by the server"] += 1

    await asyncio.gather(*(hold() for _ in range(count)))


ATTACKS: dict[str, Callable[[Target], Awaitable[None]]] = {
    name: value for name, value in globals().items() if asyncio.iscoroutinefunction(value) and not name.startswith("_")
}
KILLS = ("poison_requests",)  # which are replaced: whoever sends none of these is to see a pause at most
LETS_NOTHING_IN = ("cross_site_page",)  # of these no request is to be answered


async def main(name: str, port: str, vocab_size: str, max_model_len: str, seconds: str) -> None:
    target = Target(int(port), int(vocab_size), int(max_model_len), float(seconds))
    print("begins", file=sys.stderr, flush=True)
    await ATTACKS[name](target)
    print(json.dumps(target.answers))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
