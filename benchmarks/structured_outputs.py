"""Structured outputs: what grammars cost, and of how many schemas the output is right.

    python -P benchmarks/structured_outputs.py library TOKENIZER [--json FILE]       # compile, masks, coverage; no GPU
    python -P benchmarks/structured_outputs.py offline MODEL [--batch 64] [--json FILE] [-- FLAGS]
    python -P benchmarks/structured_outputs.py streams MODEL [--json FILE] [-- FLAGS]

`library`: the time to compile, to advance a matcher and to compute a mask for each of twenty schemas; then, of all schemas of
json_schemas.json, those that compile, and how many random outputs (each token drawn among the allowed ones) are valid as jsonschema
sees them. Schemas that cannot be enforced should be refused: they are `refused`.

`offline`: tokens/s of LLM.generate, in turns without and with a schema for each prompt (twenty different ones). All outputs have
the same length: each schema is that of the items of a long array.

`streams`: the time between two tokens of streams without a grammar, while other requests come that have none, and then while each of
them brings a schema that nobody has seen. FLAGS go to the mesh, such as --device cpu.
"""

import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parent))
import harness
from harness import KeptStream, Mesh, Stream

Schema = dict[str, Any]
# Such as people send: of tools, extraction, configuration files and APIs. The first twenty are those that are timed.
SCHEMAS: dict[str, Schema] = json.loads((Path(__file__).parent / "json_schemas.json").read_text())
TIMED = list(SCHEMAS)[:20]
STREAMS, STREAM_TOKENS, RATE, STREAM_S = 16, 4096, 20.0, 12.0


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# --- library ---


def library(tokenizer: str) -> dict[str, Any]:
    import jsonschema
    import numpy as np
    from llguidance import LLMatcher

    from meshlm.detokenizer.grammar_cache import GrammarCache
    from meshlm.detokenizer.grammars import Grammars
    from meshlm.protocol.grammar import Grammar, GrammarKind
    from meshlm.runtime.errors import RequestError
    from meshlm.runtime.grammars import limits
    from meshlm.runtime.model_files import tokenizer_files
    from meshlm.runtime.vocabulary import Vocabulary

    loaded = tokenizer_files.load(Path(tokenizer))
    size = loaded.tokenizer.get_vocab_size(with_added_tokens=True)
    eos = max(loaded.special_ids) if loaded.special_ids else size - 1
    begun = time.perf_counter()
    vocabulary = Vocabulary(loaded, size, (eos,))
    built_ms = 1e3 * (time.perf_counter() - begun)
    closing = {vocabulary.tokens_of(part)[0] for part in (b'"', b"}", b"]", b"null", b"0")}
    grammars = GrammarCache(Grammars({}).translated)
    words = np.empty(vocabulary.num_words, np.int32)

    def sample(text: str, seed: int) -> tuple[str, list[float], list[float], bool]:
        """Output, µs of masks, µs of advancing, whether it ended."""
        matcher, dice = LLMatcher(vocabulary.tokenizer, text, limits=limits(), log_level=0), np.random.default_rng(seed)
        tokens: list[int] = []
        mask_us, push_us = [], []
        for _ in range(400):
            begun = time.perf_counter()
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            mask_us.append(1e6 * (time.perf_counter() - begun))
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little", count=size))
            some = [token for token in allowed.tolist() if token in closing] if len(allowed) > 1 else []
            token = eos if eos in allowed else int(dice.choice(some if some and dice.random() < 0.6 else allowed))
            if token == eos or matcher.is_error():
                break
            begun = time.perf_counter()
            matcher.consume_token(token)
            push_us.append(1e6 * (time.perf_counter() - begun))
            tokens.append(token)
        text = b"".join(map(vocabulary.bytes_of, tokens)).decode("utf-8", "replace")
        return text, mask_us, push_us, token == eos and not matcher.is_error()

    timed, counts, refused, wrong = [], {"compiled": 0, "ended": 0, "valid": 0, "outputs": 0}, {}, []
    for name, schema in SCHEMAS.items():
        begun = time.perf_counter()
        try:
            asked = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "json", any_whitespace=False)
            compiled = grammars.compile(asked).text
        except RequestError as error:
            refused[name] = error.message
            continue
        checked_ms = 1e3 * (time.perf_counter() - begun)
        begun = time.perf_counter()
        LLMatcher(vocabulary.tokenizer, compiled, limits=limits(), log_level=0)
        compile_ms = 1e3 * (time.perf_counter() - begun)
        counts["compiled"] += 1
        masks: list[float] = []
        pushes: list[float] = []
        for seed in range(5):
            text, mask_us, push_us, ended = sample(compiled, seed)
            masks, pushes = masks + mask_us, pushes + push_us
            counts["outputs"] += 1
            counts["ended"] += ended
            try:
                if ended:
                    jsonschema.validate(json.loads(text), schema)
                    counts["valid"] += 1
            except (jsonschema.ValidationError, ValueError) as error:
                wrong.append({"schema": name, "text": text[:200], "error": str(error).splitlines()[0]})
        if name in TIMED:
            times = {"checked_ms": checked_ms, "compile_ms": compile_ms, "push_us": statistics.median(pushes or [0.0])}
            times |= {"mask_us": statistics.median(masks), "mask_p99_us": percentile(masks, 0.99)}
            timed.append({"schema": name, **{key: round(value, 2) for key, value in times.items()}})
    return {
        "vocabulary": size,
        "vocabulary_ms": round(built_ms),
        "schemas": len(SCHEMAS),
        **counts,
        "refused": refused,
        "wrong": wrong,
        "timed": timed,
    }


# --- offline ---


def long_array(schema: Schema) -> Schema:
    """The schema of an array of such values, of more than an output holds."""
    definitions = {name: schema[name] for name in ("$defs",) if name in schema}
    inner = {name: value for name, value in schema.items() if name != "$defs"}
    return {**definitions, "type": "array", "items": inner, "minItems": 2000}


def without_bounds(schema: Any) -> Any:
    """Strings of any length: the library's masks of long strings take a tenth of the time of those that are nearly over."""
    if isinstance(schema, dict):
        return {name: without_bounds(value) for name, value in schema.items() if name != "maxLength"}
    return [without_bounds(value) for value in schema] if isinstance(schema, list) else schema


def offline(model: str, batch: int, tokens: int, rounds: int, flags: dict[str, Any]) -> dict[str, Any]:
    from meshlm import LLM, SamplingParams, StructuredOutputsParams

    dice = random.Random(0)
    schemas = [long_array(SCHEMAS[name]) for name in TIMED]
    unbounded = [without_bounds(schema) for schema in schemas]
    prompts: Any = [{"prompt_token_ids": [dice.randrange(300, 40_000) for _ in range(16)]} for _ in range(batch)]
    common: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    plain = [SamplingParams(seed=n, **common) for n in range(batch)]

    def constrained(some: list[Schema]) -> list[SamplingParams]:
        asked = [StructuredOutputsParams(json=schema, disable_any_whitespace=True) for schema in some]
        return [SamplingParams(seed=n, structured_outputs=asked[n % len(asked)], **common) for n in range(batch)]

    ways = {"plain": plain, "json_schema": constrained(schemas), "without_max_length": constrained(unbounded)}
    llm = LLM(model=model, max_num_seqs=max(64, batch), **flags)
    found: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for turn in range(rounds + 1):
            for name, params in ways.items():
                begun = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - begun
                count = sum(len(output.outputs[0].token_ids) for output in outputs)
                if turn:  # the first compiles, and captures graphs
                    found[name].append(count / seconds)
                if name == "json_schema" and turn == 1:
                    texts = [output.outputs[0].text for output in outputs]
                    assert all(text.startswith("[") for text in texts), texts[:2]
    finally:
        llm.shutdown()
    best = {name: max(values) for name, values in found.items()}
    cost = {name: round(100 * (1 - value / best["plain"]), 2) for name, value in best.items() if name != "plain"}
    rounded = {name: [round(value) for value in values] for name, values in found.items()}
    return {"batch": batch, "tokens": tokens, "tokens_per_s": rounded, "cost_percent": cost}


# --- streams ---


class Gaps(Stream):
    """The gaps between the tokens of all plain streams."""

    found: ClassVar[list[float]] = []
    last = 0.0

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.last:
            Gaps.found += [now - self.last, *[0.0] * (data.count(b"data: {") - 1)]
        self.last = now


async def plain(port: int, number: int, until: float) -> None:
    """A stream without a grammar, again and again."""
    while (left := until - time.monotonic()) > 0:
        stream = await Gaps.begin(port, {"prompt": [300 + number] * 8, "max_tokens": STREAM_TOKENS, "seed": number})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stream.done, left)
        stream.transport.abort()


async def others(port: int, new_grammars: bool, until: float) -> int:
    """Short requests at RATE; each with a schema of its own, or with none."""
    number = 0
    while time.monotonic() < until:
        body: dict[str, Any] = {"prompt": [500 + number % 1000] * 8, "max_tokens": 2}
        if new_grammars:
            schema = SCHEMAS[TIMED[number % 20]]
            body["structured_outputs"] = {"json": {**schema, "title": f"schema {number}"}}
        stream = await KeptStream.begin(port, body)
        await stream.done
        assert stream.complete, bytes(stream.data[:500])
        number += 1
        await asyncio.sleep(1 / RATE)
    return number


async def measure(port: int, new_grammars: bool) -> dict[str, float]:
    until = time.monotonic() + STREAM_S
    tasks = [asyncio.create_task(plain(port, number, until)) for number in range(STREAMS)]
    await asyncio.sleep(1.0)
    Gaps.found.clear()
    count = await others(port, new_grammars, until)
    await asyncio.gather(*tasks)
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}
    return {
        "requests": count,
        **{name: round(1e3 * percentile(Gaps.found, share), 3) for name, share in shares.items()},
    }


def streams(model: str, flags: list[str], rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"plain": [], "new_schemas": []}
    with Mesh([model, *flags]) as mesh:
        asyncio.run(measure(mesh.port, True))
        for _ in range(rounds):
            found["plain"].append(asyncio.run(measure(mesh.port, False)))
            found["new_schemas"].append(asyncio.run(measure(mesh.port, True)))
    p99 = {name: statistics.median(each["p99_ms"] for each in turns) for name, turns in found.items()}
    more = 100 * (p99["new_schemas"] / p99["plain"] - 1)
    return {"streams": STREAMS, "rate": RATE, **found, "p99_more_percent": round(more, 2)}


def main() -> None:
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = harness.parser(__doc__)
    parser.add_argument("what", choices=("library", "offline", "streams"))
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(own)
    if given.what == "library":
        found = library(given.model)
    elif given.what == "offline":
        values = {flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(flags[::2], flags[1::2])}
        found = offline(given.model, given.batch, given.tokens, given.rounds, values)
    else:
        found = streams(given.model, flags, given.rounds)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    harness.keep(given.json, {given.what: found})


if __name__ == "__main__":
    main()
