"""Where the time of an answer went, as `metrics` of the answer (--enable-per-request-metrics). Pure; used by responses.py."""

from collections.abc import Sequence
from typing import Any

from meshlm.runtime.client.choice import Choice

FIELDS = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


def timing(choices: Sequence[Choice]) -> dict[str, float | None] | None:
    """vLLM's fields, in milliseconds; None for an answer of several choices, whose times are not one.

    The wait for a place in a batch; from then to the first token; from the first token to the last; of that the mean between two; and
    tokens a second from that place on. All null where no token came, or where the tokens had come on another connection before.
    """
    if len(choices) != 1:
        return None
    (choice,) = choices
    found: dict[str, Any] = dict.fromkeys(FIELDS)
    if choice.first is None or not choice.first_at or choice.num_told:
        return found
    prefill_ms, decode_ms, count = (
        choice.first.prefill_us / 1e3,
        (choice.last_at - choice.first_at) * 1e3,
        len(choice.token_ids),
    )
    found |= {
        "time_to_first_token_ms": prefill_ms,
        "generation_time_ms": decode_ms,
        "queue_time_ms": choice.first.queued_us / 1e3,
    }
    if count > 1:
        found["mean_itl_ms"] = decode_ms / (count - 1)
    if prefill_ms + decode_ms > 0:
        found["tokens_per_second"] = count / (prefill_ms + decode_ms) * 1e3
    return found
