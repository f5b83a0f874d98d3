"""What benchmarks send: random token ids, or conversations of ShareGPT."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from meshlm.supervisor.errors import UsageError

MIN_LEN, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048  # what vLLM's sampler of ShareGPT keeps


CHUNK = 500  # texts tokenized at a time
Encode = Callable[[list[str]], list[list[int]]]


class Sample(NamedTuple):
    """One request: the prompt as text or ids, and how many tokens to generate."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int


def random_ids(
    count: int, input_len: int, output_len: int, vocab_size: int, seed: int, range_ratio: float = 0.0
) -> list[Sample]:
    """Prompts of random ids. Lengths vary uniformly by +- range_ratio."""
    source = random.Random(seed)

    def length(mean: int) -> int:
        return source.randint(max(1, int(mean * (1 - range_ratio))), max(1, int(mean * (1 + range_ratio))))

    low = min(1000, vocab_size // 2)  # past the special ids of most vocabularies
    samples = []
    for _ in range(count):
        prompt = [source.randrange(low, vocab_size) for _ in range(length(input_len))]
        samples.append(Sample(prompt, len(prompt), length(output_len)))
    return samples


def sharegpt(path: str, count: int, encode: Encode, output_len: int | None, seed: int) -> list[Sample]:
    """First question of each conversation; the output is as long as the answer was."""
    try:
        conversations = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--dataset-path {path}: {error}") from None
    pairs = [
        (entry["conversations"][0]["value"], entry["conversations"][1]["value"])
        for entry in conversations
        if len(entry.get("conversations", [])) >= 2
    ]
    random.Random(seed).shuffle(pairs)
    samples: list[Sample] = []
    for begin in range(0, len(pairs), CHUNK):
        part = pairs[begin : begin + CHUNK]
        questions, answers = encode([question for question, _ in part]), encode([answer for _, answer in part])
        for (question, _), ids, reply in zip(part, questions, answers, strict=True):
            length = output_len or len(reply)
            fits = MIN_LEN <= len(ids) <= MAX_PROMPT and length >= MIN_LEN and len(ids) + length <= MAX_TOTAL
            if fits and len(samples) < count:
                samples.append(Sample(question, len(ids), length))
    if not samples:
        raise UsageError(f"--dataset-path {path}: no usable conversation")
    return samples


def percentiles(values: list[float], wanted: list[float]) -> dict[float, float]:
    """By linear interpolation, as numpy's default."""
    ordered = sorted(values)
    found = {}
    for percent in wanted:
        place = (len(ordered) - 1) * percent / 100
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        found[percent] = ordered[below] + (ordered[above] - ordered[below]) * (place - below) if ordered else 0.0
    return found
