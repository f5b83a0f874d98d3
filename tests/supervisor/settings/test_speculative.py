"""--speculative-config and its flags: vLLM's keys as one record, or one line that names what cannot be honoured."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies
from tiny_models import spec_of

from meshlm.protocol.config import (
    ExpertConfig,
    MeshConfig,
    ParallelConfig,
    ServerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from meshlm.protocol.layers import Layers, LayerSpec, StateSpec
from meshlm.runtime import platforms
from meshlm.supervisor.api.arguments import settings_of
from meshlm.supervisor.cli import main
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flag_rules, flags, notes, rules, speculative

RESOLVED = [
    field.name
    for field in msgspec.structs.fields(SpeculativeConfig)
    if field.name not in {setting.name for setting in flags.settings()}
]
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}
SUFFIX: dict[str, Any] = {"method": "suffix"}


def settled(given: Any = None, **settings: Any) -> SpeculativeConfig:
    text = given if isinstance(given, str) else "" if given is None else json.dumps(given)
    config = SpeculativeConfig(speculative_config=text, **settings)
    return speculative.settled(MeshConfig(speculative=config)).speculative


def expect(found: SpeculativeConfig, **changes: Any) -> None:
    """These fields, and the defaults of all others that are no flags."""
    assert changes.keys() <= set(RESOLVED)
    default = SpeculativeConfig()
    assert {name: getattr(found, name) for name in RESOLVED} == {
        name: changes.get(name, getattr(default, name)) for name in RESOLVED
    }


def test_no_drafts_without_a_word_of_them() -> None:
    expect(settled())
    assert SpeculativeConfig().method == ""


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        (NGRAM, {**NGRAM}),
        ({**NGRAM, "prompt_lookup_max": 4, "prompt_lookup_min": 2}, {"prompt_lookup_max": 4, "prompt_lookup_min": 2}),
        ({**NGRAM, "prompt_lookup_max": 3}, {"prompt_lookup_max": 3, "prompt_lookup_min": 3}),
        ({**NGRAM, "prompt_lookup_min": 7}, {"prompt_lookup_max": 7, "prompt_lookup_min": 7}),
        ({**NGRAM, "method": "[ngram]", "model": "ngram"}, {}),
        ({"model": "[ngram]", "num_speculative_tokens": 4}, {}),
        ({**NGRAM, "parallel_drafting": False, "quantization": None, "draft_sample_method": "greedy"}, {}),
    ],
)
def test_ngram(given: dict[str, Any], changes: dict[str, Any]) -> None:
    expect(settled(given), **{**NGRAM, **changes})


def test_a_model_that_drafts() -> None:
    for asked in ({"model": "/a/b"}, {"method": "draft_model", "model": "/a/b"}):
        found = settled({**asked, "num_speculative_tokens": 4})
        assert (found.method, found.model, found.num_speculative_tokens) == ("draft_model", "/a/b", 4)


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        (SUFFIX, {"num_speculative_tokens": 15}),
        ({"suffix_decoding_max_tree_depth": 8}, {"num_speculative_tokens": 8}),
        ({"num_speculative_tokens": 15, "suffix_decoding_max_tree_depth": 8}, {}),
        ({"num_speculative_tokens": 2, "suffix_decoding_max_cached_requests": 0}, {}),
        ({"num_speculative_tokens": 2, "suffix_decoding_max_spec_factor": 2, "suffix_decoding_min_token_prob": 0}, {}),
    ],
)
def test_suffix(given: dict[str, Any], changes: dict[str, Any]) -> None:
    expect(settled({**SUFFIX, **given}), **{**SUFFIX, **given, **changes})


def test_flags_of_their_own() -> None:
    expect(settled(spec_method="ngram", spec_tokens=3), method="ngram", num_speculative_tokens=3)
    expect(settled(NGRAM, spec_method="ngram", spec_tokens=4, spec_model="ngram"), **NGRAM)
    expect(settled(spec_model="ngram", spec_tokens=2), method="ngram", num_speculative_tokens=2)
    with pytest.raises(
        UsageError, match=r"^--speculative-config: num_speculative_tokens 4 is not what --spec-tokens says"
    ):
        settled(NGRAM, spec_tokens=3)
    with pytest.raises(UsageError, match=r"^--spec-tokens 16: a whole number from 1 to 15 is expected$"):
        settled(spec_method="ngram", spec_tokens=16)
    with pytest.raises(UsageError, match=r"^--spec-method medusa: drafts of a model's further heads are not there; "):
        settled(spec_method="medusa", spec_tokens=3)
    with pytest.raises(
        UsageError,
        match=r"^--speculative-config: method is missing; there are ngram, suffix, draft_model, eagle, eagle3, mtp$",
    ):
        settled(spec_tokens=3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", " {: "),
        ("[]", r" \[\]: a JSON object is expected"),
        ("{}", ": method is missing; there are ngram, suffix, draft_model, eagle, eagle3, mtp"),
        ({"method": 3}, ": method 3: there are ngram, suffix, draft_model, eagle, eagle3, mtp"),
        ({"method": ["ngram"]}, r': method \["ngram"\]: there are ngram, suffix, draft_model, eagle, eagle3, mtp'),
        ({"method": "ngrams"}, ': method "ngrams": there are ngram, suffix, draft_model, eagle, eagle3, mtp'),
        ({"method": "draft_model", "num_speculative_tokens": 3}, ": model is missing: a folder, a .gguf file or a hub name"),
        ({"model": "meta-llama/Llama-3.2-1B"}, ": num_speculative_tokens is missing; 1 to 15"),
        ({"method": "deepseek_mtp"}, ": num_speculative_tokens is missing; 1 to 15"),
        ({"method": "mtp", "model": "/a", "num_speculative_tokens": 1}, ': model "/a": mtp needs none; leave it out'),
        ({"method": "eagle3", "num_speculative_tokens": 3}, ": model is missing: a folder, a .gguf file or a hub name"),
        ({"num_speculative_tokens": 2, "method": "ngram", "prompt_lookup": 3}, r": unknown key prompt_lookup; did you mean .*\?"),
        ({"method": "ngram"}, ": num_speculative_tokens is missing; 1 to 15"),
        ({**NGRAM, "num_speculative_tokens": 0}, ": num_speculative_tokens 0: a whole number from 1 to 15 is expected"),
        ({**NGRAM, "num_speculative_tokens": 16}, ": num_speculative_tokens 16: a whole number from 1 to 15"),
        ({**NGRAM, "num_speculative_tokens": True}, ": num_speculative_tokens true: a whole number from 1 to 15"),
        ({**NGRAM, "num_speculative_tokens": 2.5}, ": num_speculative_tokens 2.5: a whole number from 1 to 15"),
        ({**SUFFIX, "num_speculative_tokens": 24}, ": num_speculative_tokens 24: a whole number from 1 to 15"),
        ({**NGRAM, "prompt_lookup_min": 0}, ": prompt_lookup_min 0: a whole number from 1 to "),
        ({**NGRAM, "prompt_lookup_max": 10**30}, ": prompt_lookup_max 10+: a whole number from 1 to "),
        ({**NGRAM, "prompt_lookup_max": 2, "prompt_lookup_min": 3}, r": prompt_lookup_max 2: it is less than prompt_lookup_min \(3\)"),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 3}, ": suffix_decoding_max_tree_depth 3: it is of the method suffix; l"),
        ({**SUFFIX, "prompt_lookup_max": 3}, ": prompt_lookup_max 3: it is of the method ngram; leave it out"),
        ({**SUFFIX, "suffix_decoding_max_tree_depth": 0}, ": suffix_decoding_max_tree_depth 0: a whole number from 1"),
        ({**SUFFIX, "suffix_decoding_max_cached_requests": -1}, ": suffix_decoding_max_cached_requests -1: a whole number from 0"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": NaN}', ": suffix_decoding_max_spec_factor NaN: a number from 0"),
        ({**SUFFIX, "suffix_decoding_min_token_prob": 1.5}, ": suffix_decoding_min_token_prob 1.5: a number from 0 to 1"),
        ({**NGRAM, "model": "x/y"}, ': model "x/y": ngram needs none; leave it out'),
        ({**NGRAM, "draft_sample_method": "probabilistic"}, ': draft_sample_method "probabilistic": a draft is accepted where'),
        ({**NGRAM, "draft_tensor_parallel_size": 1}, ": draft_tensor_parallel_size 1: a model that drafts is served as the"),
        ({**NGRAM, "enforce_eager": True}, ": enforce_eager true: a model that drafts is served as the"),
        ({**NGRAM, "disable_by_batch_size": 8}, ": disable_by_batch_size 8: the number of drafts follows no table"),
        ({**NGRAM, "rejection_sample_method": "block"}, ': rejection_sample_method "block": there are standard, and synthetic'),
        ({**NGRAM, "synthetic_acceptance_rates": [1, 1, 1, 1]}, ": synthetic_acceptance_rates: it needs rejection_sample_method"),
        ({**NGRAM, "synthetic_acceptance_length": 2}, ": synthetic_acceptance_length: it needs rejection_sample_method synthetic"),
    ],
)  # fmt: skip
def test_refused_in_one_line_that_names_the_key(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=f"^--speculative-config{said}") as raised:
        settled(given)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("method", speculative.ABSENT)
def test_each_method_that_is_not_there_says_why(method: str) -> None:
    with pytest.raises(
        UsageError,
        match=f'^--speculative-config: method "{method}": .*; there are ngram, suffix, draft_model, eagle, eagle3, mtp$',
    ):
        settled({"method": method, "num_speculative_tokens": 3, "model": "x/y"})


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ({"synthetic_acceptance_rates": [1, 0.5, 0.5, 0]}, (1.0, 0.5, 0.5, 0.0)),
        ({"synthetic_acceptance_length": 1}, (0.0, 0.0, 0.0, 0.0)),
        ({"synthetic_acceptance_length": 3.25}, (1.0, 1.0, 0.25, 0.0)),
        ({"synthetic_acceptance_length": 5}, (1.0, 1.0, 1.0, 1.0)),
    ],
)
def test_synthetic(given: dict[str, Any], rates: tuple[float, ...]) -> None:
    found = settled({**NGRAM, "rejection_sample_method": "synthetic", **given})
    expect(found, **NGRAM, rejection_sample_method="synthetic", synthetic_acceptance_rates=rates)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "rejection_sample_method synthetic: give one of synthetic_acceptance_rates and synthetic_acceptance_length$"),
        ({"synthetic_acceptance_rates": [1, 1, 1, 1], "synthetic_acceptance_length": 2}, "rejection_sample_method synthetic: give"),
        ({"synthetic_acceptance_rates": [1, 1, 1]}, r"synthetic_acceptance_rates \[1, 1, 1\]: a list of 4 numbers from 0 to 1"),
        ({"synthetic_acceptance_rates": [1, 1, 1, 1.5]}, r"synthetic_acceptance_rates \[1, 1, 1, 1.5\]: a list of 4 numbers"),
        ({"synthetic_acceptance_rates": 1}, "synthetic_acceptance_rates 1: a list of 4 numbers"),
        ({"synthetic_acceptance_rates": [0.5, 0.5, 0.75, 0]}, r"synthetic_acceptance_rates \[.*\]: they rise"),
        ({"synthetic_acceptance_length": 5.5}, "synthetic_acceptance_length 5.5: a step has 1 to 5 tokens$"),
        ({"synthetic_acceptance_length": 0.5}, "synthetic_acceptance_length 0.5: a number from 1 to 16 is expected$"),
    ],
)  # fmt: skip
def test_synthetic_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"^--speculative-config: {said}"):
        settled({**NGRAM, "rejection_sample_method": "synthetic", **given})


@given(strategies.integers(1, 15), strategies.floats(0, 1))
def test_rates_of_a_length_have_that_mean_and_never_rise(count: int, share: float) -> None:
    length = 1 + share * count
    rates = settled(
        {
            "method": "ngram",
            "num_speculative_tokens": count,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": length,
        }
    ).synthetic_acceptance_rates
    assert len(rates) == count
    assert list(rates) == sorted(rates, reverse=True)
    assert sum(rates) == pytest.approx(length - 1)


def test_the_fake_device_drafts_by_a_flag_of_its_own() -> None:
    facts = flag_rules.Facts(spec_of(), platforms.named("fake"))
    rules.check(speculative.rules(MeshConfig(), facts, pools=False))
    drafting = MeshConfig(speculative=SpeculativeConfig(**NGRAM))
    with pytest.raises(UsageError, match=r"^--device fake: it drafts what --fake-drafts says; give that alone$"):
        rules.check(speculative.rules(drafting, facts, pools=False))


STATE = StateSpec(kind="mamba2", num_heads=4, head_dim=2, state_size=2, n_groups=2)
ON_GPU: dict[str, tuple[MeshConfig, str, Layers, str]] = {
    "suffix": (MeshConfig(), "suffix", spec_of().layers, "method suffix: on a GPU there are ngram, draft_model, mtp"),
    "states": (MeshConfig(), "ngram", Layers.alike(LayerSpec(state=STATE), 2), "states of LlamaForCausalLM go back on"),
    "pipeline": (
        MeshConfig(parallel=ParallelConfig(pipeline_parallel_size=2)),
        "ngram",
        spec_of().layers,
        "on GPUs the stages of a pipeline draft nothing so far; leave it out",
    ),
    "experts": (
        MeshConfig(parallel=ParallelConfig(data_parallel_size=2), experts=ExpertConfig(enable_expert_parallel=True)),
        "ngram",
        spec_of().layers,
        "GPUs that share experts draft nothing so far; leave it out",
    ),
}


@pytest.mark.parametrize("name", ON_GPU)
def test_what_drafts_nothing_on_a_gpu(name: str) -> None:
    config, method, layers, said = ON_GPU[name]
    facts = flag_rules.Facts(spec_of(layers=layers), platforms.named("cuda"))
    rules.check(speculative.rules(config, facts, pools=False))
    plain = MeshConfig(speculative=SpeculativeConfig(**NGRAM))
    rules.check(speculative.rules(plain, flag_rules.Facts(spec_of(), platforms.named("cuda")), pools=False))
    asked = SpeculativeConfig(method=method, num_speculative_tokens=2)
    with pytest.raises(UsageError, match=f"^--speculative-config: {said}"):
        rules.check(speculative.rules(msgspec.structs.replace(config, speculative=asked), facts, pools=False))


def test_models_that_cannot_have_drafts() -> None:
    facts = flag_rules.Facts(spec_of(), platforms.named("cpu"))
    rules.check(speculative.rules(MeshConfig(), facts, pools=True))
    said = "LlamaForCausalLM gives vectors here, and no text to draft; leave it out"
    with pytest.raises(UsageError, match=f"^--speculative-config: {said}$"):
        rules.check(speculative.rules(MeshConfig(speculative=SpeculativeConfig(**NGRAM)), facts, pools=True))


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_what_reads_states_does_not_draft_for_a_pipeline(method: str) -> None:
    staged = MeshConfig(parallel=ParallelConfig(pipeline_parallel_size=2), speculative=SpeculativeConfig(**NGRAM))
    cpu = platforms.named("cpu")
    rules.check(speculative.rules(staged, flag_rules.Facts(spec_of(), cpu), pools=False))
    drafting = msgspec.structs.replace(staged, speculative=SpeculativeConfig(method=method, num_speculative_tokens=2))
    said = "each stage of a pipeline drafts, and has no states of the others; use ngram or suffix"
    with pytest.raises(UsageError, match=f"^--speculative-config: method {method}: {said}$"):
        rules.check(speculative.rules(drafting, flag_rules.Facts(spec_of(), cpu), pools=False))
    states = spec_of(layers=Layers.alike(LayerSpec(state=STATE), 2))
    with pytest.raises(UsageError, match=r"states of LlamaForCausalLM cannot go back in a pipeline; leave it out$"):
        rules.check(speculative.rules(staged, flag_rules.Facts(states, cpu), pools=False))


def test_models_with_states_have_drafts_but_no_model_that_drafts() -> None:
    facts = flag_rules.Facts(spec_of(layers=Layers.alike(LayerSpec(state=STATE), 1)), platforms.named("cpu"))
    rules.check(speculative.rules(MeshConfig(speculative=SpeculativeConfig(**NGRAM)), facts, pools=False))
    drafting = MeshConfig(speculative=SpeculativeConfig(method="draft_model", model="/a", num_speculative_tokens=2))
    said = (
        "method draft_model: caches of a model that drafts do not fit into pages of the states of LlamaForCausalLM; use"
    )
    with pytest.raises(UsageError, match=f"^--speculative-config: {said} ngram, suffix or mtp$"):
        rules.check(speculative.rules(drafting, facts, pools=False))


def test_the_command_line_and_python_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    config = flags.build(settings_of({"speculative_config": NGRAM}), None)
    expect(speculative.settled(config).speculative, **NGRAM)
    for words in (
        ["-sc", json.dumps({"method": "medusa"})],
        ["--speculative-config.method", "medusa"],
        ["--spec-method=medusa"],
    ):
        assert main.run(["serve", "--dry-run", "--device", "fake", *words]) != 0
        assert "further heads are not there" in capsys.readouterr().err


def test_the_fake_device_has_a_flag_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "fake", "--fake-drafts", "3", "--spec-method", "ngram", "--spec-tokens", "2"]
    assert main.run(["serve", "--dry-run", *words]) != 0
    assert "--device fake: it drafts what --fake-drafts says; give that alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "device", "most"),
    [
        (MeshConfig(), "cpu", 0),
        (MeshConfig(speculative=SpeculativeConfig(**NGRAM)), "cpu", 4),
        (MeshConfig(worker=WorkerConfig(fake_drafts=5)), "fake", 5),
        (MeshConfig(worker=WorkerConfig(fake_drafts=5)), "cpu", 0),
        (MeshConfig(worker=WorkerConfig(fake_drafts=5), parallel=ParallelConfig(pipeline_parallel_size=2)), "fake", 5),
    ],
)
def test_how_many_a_server_drafts(config: MeshConfig, device: str, most: int) -> None:
    assert speculative.most(config, device) == most


def test_metrics_of_requests_are_not_for_grpc() -> None:
    config = flags.build({"per_request_spec_decode_metrics": "summary", "grpc": True}, None)
    with pytest.raises(UsageError, match=r"^--per-request-spec-decode-metrics summary: it is for HTTP, not for --grpc"):
        rules.check(flag_rules.server(config))


def test_metrics_of_requests_have_no_effect_without_drafts() -> None:
    config = flags.build({"per_request_spec_decode_metrics": "summary"}, None)
    (said,) = notes.of_idle(config, notes.Facts("cpu", transcribes=False))
    assert said == "without effect here: --per-request-spec-decode-metrics (it is of --speculative-config)"


@pytest.mark.parametrize(
    ("mode", "device", "refused"),
    [("processed_logprobs", "cuda", True), ("raw_logits", "cuda", False), ("processed_logits", "cpu", False)],
)
def test_logprobs_of_drafts(mode: Any, device: str, refused: bool) -> None:
    config = MeshConfig(
        server=ServerConfig(logprobs_mode=mode), speculative=SpeculativeConfig(speculative_config='{"method": "ngram"}')
    )
    found = [
        flag
        for holds, flag, _ in flag_rules.logprobs(config, flag_rules.Facts(spec_of(), platforms.named(device)))
        if holds
    ]
    assert found == ([f"--logprobs-mode {mode}"] if refused else [])
