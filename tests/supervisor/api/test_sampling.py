"""SamplingParams of the Python API: what is not allowed is named before anything is computed."""

from typing import Any, cast

import pytest

from meshlm.protocol.config import StructuredOutputsConfig
from meshlm.protocol.drafting import Drafting
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.protocol.samplers import SequenceBreakers
from meshlm.supervisor.api.sampling import NOT_SUPPORTED, SamplingParams, StructuredOutputsParams


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
        ("typical_p", 1.5, 0.0),
        ("typical_p", float("nan"), 1),
        ("typical_p", True, 0.5),
        ("top_n_sigma", "a", -1),
        ("xtc_probability", -0.1, 1.0),
        ("xtc_threshold", 2.0, 0.5),
        ("dry_multiplier", float("inf"), 0.8),
        ("dry_base", -1.0, 1.75),
        ("dry_allowed_length", 1.5, 0),
        ("dry_penalty_last_n", -2, 0),
        ("dry_sequence_breakers", ["ab"], ["a"]),
        ("temperature", float("nan"), 0.0),
        ("temperature", float("inf"), 2.0),
        ("repetition_penalty", float("inf"), 1.1),
        ("logit_bias", {3: float("nan")}, {3: float("-inf")}),
        ("stop", "", "END"),
        ("stop", ["a", ""], []),
        ("seed", 1 << 63, -1),
        ("num_speculative_tokens", -1, 0),
    ],
)
def test_values_that_no_worker_could_use(name: str, value: object, fine: object) -> None:
    """On a GPU an id outside the vocabulary would end the worker, and with it every other request's step."""
    with pytest.raises(ValueError, match=f"^SamplingParams.{name}: .* is not allowed"):
        SamplingParams(**{name: value}).check(100)  # type: ignore[arg-type]
    SamplingParams(**{name: fine}).check(100)  # type: ignore[arg-type]


def test_the_number_of_drafts() -> None:
    for wanted, extras in ((None, ()), (0, (Drafting(0),)), (2, (Drafting(2),)), (3, ())):
        assert SamplingParams(num_speculative_tokens=wanted).drafting(3) == extras
    with pytest.raises(
        ValueError, match=r"^SamplingParams.num_speculative_tokens: at most 3, which the server drafts$"
    ):
        SamplingParams(num_speculative_tokens=4).drafting(3)
    with pytest.raises(ValueError, match=r"^SamplingParams.num_speculative_tokens: the server drafts no tokens"):
        SamplingParams(num_speculative_tokens=1).drafting(0)
    assert SamplingParams(num_speculative_tokens=0).drafting(0) == ()


def test_llama_cpps_samplers() -> None:
    asked = SamplingParams(typical_p=0.5, dry_multiplier=1, dry_sequence_breakers=["a"])
    wire = asked.wire((), 100, drawn=1)
    assert (wire.typical_p, wire.dry_multiplier, wire.dry_sequence_breakers) == (0.5, 1.0, ("a",))
    assert asked.extras(StructuredOutputsConfig()) == (SequenceBreakers(("a",)),)
    assert SamplingParams(dry_multiplier=1.0, dry_base=0.5).extras(StructuredOutputsConfig()) == ()


def test_a_bias_has_openais_range() -> None:
    assert SamplingParams(logit_bias={3: 1e9, 4: -1e9}).wire((), 100, drawn=1).logit_bias == {3: 100.0, 4: -100.0}


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_what_is_not_supported_is_named_at_once(name: str) -> None:
    with pytest.raises(ValueError, match=f"^SamplingParams.{name}: not supported; "):
        SamplingParams(**{name: cast(Any, ["x"])})


VLLM_FIELDS = [
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
    "skip_clone",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "extra_args",
    "routed_experts_prompt_start",
    "bad_words",
    "skip_reading_prefix_cache",
    "thinking_token_budget",
    "repetition_detection",
]


@pytest.mark.parametrize("name", VLLM_FIELDS)
def test_each_field_of_vllms_is_known(name: str) -> None:
    """With its default."""
    found = SamplingParams()
    assert SamplingParams(**{name: getattr(found, name)}) == found


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("max_tokens", 16.0, 16),
        ("n", 2.0, 2),
        ("seed", 1e2, 100),
        ("seed", -1, None),
        ("top_k", -1.0, -1),
        ("logprobs", True, 1),
        ("prompt_logprobs", False, None),
        ("max_tokens", None, None),
    ],
)
def test_numbers_as_vllm_reads_them(name: str, value: object, read: object) -> None:
    found = getattr(SamplingParams(**{name: value}), name)  # type: ignore[arg-type]
    assert (found, type(found)) == (read, type(read))


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 1.5), ("max_tokens", "16"), ("n", None), ("n", True), ("temperature", "hot")]
)
def test_what_is_no_number_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^SamplingParams.{name}: "):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_other_mistakes_are_found_at_once() -> None:
    with pytest.raises(ValueError, match=r"SamplingParams.top_p: 2 is not allowed"):
        SamplingParams(top_p=2)
    with pytest.raises(ValueError, match="detokenize=True"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(TypeError):
        SamplingParams(1, 16)  # type: ignore[call-arg]  # vLLM's second field is another one
    assert SamplingParams.from_optional(n=None, logit_bias={"3": 1.0}, max_tokens=None) == SamplingParams(
        logit_bias={3: 1.0}, max_tokens=None
    )


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"json": {"type": "object"}}, GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
        ({"json": '{"a": 1}'}, GrammarKind.JSON_SCHEMA, '{"a": 1}'),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"choice": ["a", "b"]}, GrammarKind.CHOICE, '["a","b"]'),
        ({"grammar": "start: A"}, GrammarKind.GRAMMAR, "start: A"),
        ({"json_object": True}, GrammarKind.JSON_OBJECT, ""),
        ({"structural_tag": '{"format": {}}'}, GrammarKind.STRUCTURAL_TAG, '{"format": {}}'),
    ],
)
def test_structured_outputs(fields: dict[str, Any], kind: GrammarKind, text: str) -> None:
    asked = StructuredOutputsParams(**fields, disable_any_whitespace=True, whitespace_pattern=" ")
    (grammar,) = SamplingParams(structured_outputs=asked).extras(StructuredOutputsConfig())
    assert isinstance(grammar, Grammar)
    assert (grammar.kind, grammar.text, grammar.strict) == (kind, text, True)
    assert (grammar.any_whitespace, grammar.additional_properties, grammar.whitespace_pattern) == (False, True, " ")
    config = StructuredOutputsConfig(disable_additional_properties=True)
    (grammar,) = SamplingParams(structured_outputs=asked).extras(config)
    assert isinstance(grammar, Grammar)
    assert not grammar.additional_properties


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": {}, "regex": "a"},
        {"choice": []},
        {"regex": 3},
        {"json_object": False},
        {"json": {"a": {3: object()}}},
    ],
)
def test_structured_outputs_that_are_none(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="StructuredOutputsParams"):
        StructuredOutputsParams(**fields)
    with pytest.raises(ValueError, match="structured_outputs"):
        SamplingParams(structured_outputs=cast(Any, fields))
