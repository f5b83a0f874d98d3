"""The times at which requests are sent: as a Poisson process, in bursts or evenly (gamma distribution), or faster and faster. Pure."""

import math
import random
from typing import NamedTuple

INFINITE = math.inf


class RampUp(NamedTuple):
    """A rate of requests per second that grows from one value to another."""

    strategy: str  # linear or exponential
    start: float
    end: float

    def rate(self, progress: float) -> float:
        """`progress` from 0 to 1."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return float(self.start * (self.end / self.start) ** progress)


def delays(count: int, rate: float, burstiness: float, ramp_up: RampUp | None, source: random.Random) -> list[float]:
    """Seconds from the start to each request. Without ramp_up they are stretched, so that the last one comes at count / rate."""
    total, found = 0.0, []
    for number in range(count):
        now = ramp_up.rate(number / max(1, count - 1)) if ramp_up else rate
        if now < INFINITE:
            even = burstiness == INFINITE
            total += 1 / now if even else source.gammavariate(burstiness, 1 / (now * burstiness))
        found.append(total)
    if ramp_up is None and total > 0:
        found = [delay * count / rate / total for delay in found]
    return found
