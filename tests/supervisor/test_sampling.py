"""SamplingParams of the Python API: what is not allowed is named before anything is computed."""

import pytest

from meshlm.supervisor.sampling import SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "fine"),
    [
        ("stop_token_ids", [99, 100], [99]),
        ("logit_bias", {100: 1.0}, {0: 1.0, 99: -1.0}),
        ("allowed_token_ids", [-1, 3], [3]),
        ("logprobs", 101, 100),
        ("prompt_logprobs", 101, 0),
        ("top_p", 0.0, 1.0),
        ("allowed_token_ids", [], None),
        ("min_tokens", 17, 16),
        ("temperature", float("nan"), 0.0),
        ("temperature", float("inf"), 2.0),
        ("repetition_penalty", float("inf"), 1.1),
        ("logit_bias", {3: float("nan")}, {3: float("-inf")}),
        ("stop", "", "END"),
        ("stop", ["a", ""], []),
        ("seed", 1 << 63, -1),
    ],
)
def test_values_that_no_worker_could_use(name: str, value: object, fine: object) -> None:
    """On a GPU an id outside the vocabulary would end the worker, and with it every other request's step."""
    with pytest.raises(ValueError, match=f"^SamplingParams.{name}: .* is not allowed"):
        SamplingParams(**{name: value}).check(100)  # type: ignore[arg-type]
    SamplingParams(**{name: fine}).check(100)  # type: ignore[arg-type]


def test_a_bias_has_openais_range() -> None:
    assert SamplingParams(logit_bias={3: 1e9, 4: -1e9}).wire((), 100).logit_bias == {3: 100.0, 4: -100.0}
