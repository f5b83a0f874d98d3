"""What simulate.py models of the outside: how long a step takes, and what clients ask."""

import json
import random
import statistics
from array import array
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct


class Timing(Struct, frozen=True):
    """Seconds of a step: reading the weights or computing the prompts, whichever is longer, and reading the KV of the decodes."""

    base_s: float
    prefill_token_s: float
    kv_token_s: float

    def step(self, num_prefill: int, kv_tokens: int) -> float:
        return max(self.base_s, num_prefill * self.prefill_token_s) + kv_tokens * self.kv_token_s


def fitted(file: Path) -> Timing:
    """From measured steps: least squares over the decode steps; the prefill rate from the longest prompts."""
    rows = json.loads(file.read_text())["results"]
    tokens = [row["batch"] * row["context"] for row in rows]
    fit = statistics.linear_regression(tokens, [row["step_ms"] / 1e3 for row in rows])
    longest = [row["prefill_ms"] / 1e3 / row["prefill_tokens"] for row in rows if row["prefill_tokens"] >= 4096]
    return Timing(max(fit.intercept, min(row["step_ms"] for row in rows) / 1e3), statistics.mean(longest), fit.slope)


# --- traffic ---


class Job:
    """One request, and what its client sends after it."""

    __slots__ = ("arrived", "first", "name", "output", "prompt", "then")

    def __init__(
        self, name: str, prompt: "array[int]", output: int, then: "Callable[[Job], None] | None" = None
    ) -> None:
        self.name, self.prompt, self.output, self.then = name, prompt, output, then
        self.arrived = self.first = 0.0


class Traffic:
    """Draws requests. `shared-prefix`: many users with a system prompt of their own, one question each time. `multi-turn`: users
    whose conversations of five turns bring back all that was said; all share a system prompt with a few others."""

    def __init__(self, kind: str, num_ranks: int, rate: float, output: float, dice: random.Random) -> None:
        self.kind, self.rate, self.output, self.dice = kind, rate * num_ranks, output, dice
        self.num_users = 32 * num_ranks if kind == "shared-prefix" else 4 * num_ranks
        self.turns = 1 if kind == "shared-prefix" else 5
        self._systems: dict[int, array[int]] = {}
        self.count = 0

    def tokens(self, count: int) -> "array[int]":
        return array("i", self.dice.choices(range(100, 120_000), k=count))

    def system(self) -> "array[int]":
        user = self.dice.randrange(self.num_users)
        if user not in self._systems:
            self._systems[user] = self.tokens(2048)
        return self._systems[user]

    def prompt(self, before: "array[int] | None") -> "array[int]":
        return (self.system() if before is None else before) + self.tokens(128)

    def job(self, before: "array[int] | None" = None, then: "Callable[[Job], None] | None" = None) -> Job:
        self.count += 1
        return Job(
            f"r{self.count}", self.prompt(before), min(400, 1 + int(self.dice.expovariate(1 / self.output))), then
        )

    def gap(self) -> float:
        """Seconds to the next conversation."""
        return self.dice.expovariate(self.rate / self.turns)
