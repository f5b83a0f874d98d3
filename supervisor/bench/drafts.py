"""What a server counted of drafted tokens while it was measured, from its /metrics: MeshLM's or vLLM's, whose names are the same."""

import re
from collections.abc import Mapping
from typing import Any

from meshlm.supervisor.cli.terminal import Server
from meshlm.supervisor.errors import StartError

Counts = Mapping[tuple[str, int], float]  # by name and position in the draft; -1: of all
LIMIT_S = 10.0  # of a server whose /metrics do not answer
PER_POSITION = "num_accepted_tokens_per_pos"
_LINE = re.compile(
    rb"^\w+:spec_decode_(num_drafts|num_draft_tokens|num_accepted_tokens|num_accepted_tokens_per_pos)(?:_total)?"
    rb"(?:\{(?:[^}\n]*\bposition=\"(\d+)\")?[^}\n]*\})? ([\d.e+]+)$",
    re.M,
)


def counted(server: Server) -> Counts | None:
    """The counts of all ranks since they began; None of a server that has no /metrics."""
    try:
        with server.request("GET", "/metrics", timeout_s=LIMIT_S) as answer:
            return counts_in(answer.read())
    except StartError:
        return None


def counts_in(text: bytes) -> Counts:
    found: dict[tuple[str, int], float] = {}
    for name, position, value in _LINE.findall(text):
        key = name.decode(), int(position or -1)
        found[key] = found.get(key, 0.0) + float(value)
    return found


def summed_up(before: Counts | None, after: Counts | None) -> dict[str, Any]:
    """What was counted between the two, by vLLM's names in a result; nothing where no token was drafted."""
    if before is None or after is None:
        return {}
    grown = {key: int(count - before.get(key, 0)) for key, count in after.items()}
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    drafts, tokens, accepted = (grown.get((name, -1), 0) for name in names)
    if drafts <= 0 or tokens <= 0:
        return {}
    rates = [grown[key] / drafts for key in sorted(grown) if key[0] == PER_POSITION]
    return {
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": rates,
    }
