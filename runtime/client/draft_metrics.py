"""What a sequence that has ended tells of the tokens that were drafted for it (--per-request-spec-decode-metrics). Pure.

Used for the answers of frontends (metrics.speculative_decoding) and for the outputs of the Python API.
"""

from typing import NamedTuple

from msgspec import UNSET, Struct, UnsetType

from meshlm.protocol.config import MeshConfig


class DraftsTold(NamedTuple):
    """What is told."""

    num_spec_tokens: int  # drafted in a step, at most
    by_step: bool


class SpecDecodeMetrics(Struct, frozen=True):
    """Of the steps that had drafts; names are vLLM's. acceptance_histogram: how many of them accepted 0, 1 ... drafts;
    acceptance_histogram_by_draft_length: the same, by the number of drafts. per_step_...: where each step is told."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET


def drafts_told(config: MeshConfig) -> DraftsTold | None:
    """As the settings want it; None: nothing, or nothing is drafted."""
    wanted, most = config.speculative.per_request_spec_decode_metrics, config.require_resolved().num_speculative_tokens
    return DraftsTold(most, wanted == "detailed") if most and wanted != "none" else None


def metrics_of(drafts: bytes, told: DraftsTold) -> SpecDecodeMetrics:
    """drafts: uint8 [steps, 2], tokens drafted and accepted, as in Finished."""
    drafted, accepted = drafts[::2], drafts[1::2]
    by_length = {most: [0] * (most + 1) for most in sorted(set(drafted))}
    for most, count in zip(drafted, accepted, strict=True):
        by_length[most][count] += 1
    return SpecDecodeMetrics(
        mean_acceptance_length=1 + sum(accepted) / max(1, len(drafted)),
        draft_acceptance_rate=sum(accepted) / max(1, sum(drafted)),
        acceptance_histogram=[accepted.count(count) for count in range(told.num_spec_tokens + 1)],
        acceptance_histogram_by_draft_length={str(most): counts for most, counts in by_length.items()},
        num_spec_steps=len(drafted),
        num_accepted_draft_tokens=sum(accepted),
        num_draft_tokens=sum(drafted),
        num_spec_tokens=told.num_spec_tokens,
        per_step_accepted=list(accepted) if told.by_step else UNSET,
        per_step_drafted=list(drafted) if told.by_step else UNSET,
    )
