"""What a sequence tells of its drafts is what its steps were."""

from typing import Any

import pytest
from hypothesis import given, strategies
from msgspec import UNSET
from tiny_models import resolved_of, spec_of

from meshlm.protocol.config import MeshConfig, SpeculativeConfig
from meshlm.runtime.client.draft_metrics import DraftsTold, drafts_told, metrics_of

STEP = strategies.integers(1, 15).flatmap(
    lambda most: strategies.tuples(strategies.just(most), strategies.integers(0, most))
)


@given(strategies.lists(STEP))
def test_the_histograms_are_those_of_the_steps(steps: list[tuple[int, int]]) -> None:
    drafts = bytes(number for step in steps for number in step)
    found = metrics_of(drafts, DraftsTold(15, by_step=True))
    histogram, by_length = found.acceptance_histogram, found.acceptance_histogram_by_draft_length
    assert len(histogram) == 16
    assert sum(histogram) == sum(map(sum, by_length.values())) == found.num_spec_steps == len(steps)
    assert sum(place * count for place, count in enumerate(histogram)) == found.num_accepted_draft_tokens
    assert sum(int(most) * sum(counts) for most, counts in by_length.items()) == found.num_draft_tokens
    assert found.per_step_drafted is not UNSET
    assert found.per_step_accepted is not UNSET
    assert list(zip(found.per_step_drafted, found.per_step_accepted, strict=True)) == steps


@pytest.mark.parametrize(
    ("level", "most", "told"),
    [
        ("none", 3, None),
        ("summary", 0, None),
        ("summary", 3, DraftsTold(3, by_step=False)),
        ("detailed", 3, DraftsTold(3, by_step=True)),
    ],
)
def test_what_is_told_is_what_the_settings_want(level: Any, most: int, told: DraftsTold | None) -> None:
    resolved = resolved_of(spec_of(), device="fake", num_speculative_tokens=most)
    speculative = SpeculativeConfig(per_request_spec_decode_metrics=level)
    assert drafts_told(MeshConfig(speculative=speculative, resolved=resolved)) == told
