"""Sampling defaults of requests that say nothing, the limit on output, and the settings that are named because nothing applies them."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.generation_config import (
    NEEDLESS,
    NEUTRAL,
    RANGES,
    GenerationConfig,
    chosen,
    of_model,
    with_eos,
)

OWN = GenerationConfig(defaults={"temperature": 0.6, "max_tokens": 100}, eos_token_ids=(1,), notes=("said",))
# What changes the text that transformers makes: named where it asks for something.
NAMED: dict[str, Any] = {
    "max_length": 20,
    "min_length": 3,
    "min_new_tokens": 3,
    "max_time": 1.5,
    "stop_strings": ["x"],
    "num_beams": 4,
    "num_beam_groups": 2,
    "top_h": 0.4,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[5]],
    "renormalize_logits": True,
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 3,
    "exponential_decay_length_penalty": [5, 1.1],
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "sequence_bias": [[[5], 1.0]],
    "token_healing": True,
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.0},
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "diversity_penalty": 0.5,
    "constraints": ["x"],
    "force_words_ids": [[5]],
}


def test_whose_defaults(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5, "max_new_tokens": 9, "eos_token_id": 7}))
    assert chosen(OWN, "auto", "") == OWN
    for none in ("vllm", "meshlm"):
        assert chosen(OWN, none, "") == GenerationConfig(eos_token_ids=(1,))
    folder = GenerationConfig(defaults={"top_p": 0.5, "max_tokens": 9}, max_output_tokens=9, eos_token_ids=(7,))
    assert chosen(OWN, str(tmp_path), "") == chosen(OWN, str(tmp_path / "generation_config.json"), "") == folder
    changed = chosen(OWN, "auto", '{"temperature": 0, "top_k": 5.0}')
    assert changed.defaults == {"temperature": 0, "top_k": 5, "max_tokens": 100}


@pytest.mark.parametrize(
    ("source", "override", "limit"),
    [
        ("auto", "", None),
        ("auto", '{"top_k": 7}', None),
        ("auto", '{"max_new_tokens": 7}', 7),
        ("vllm", '{"max_new_tokens": 7}', 7),
        ("DIR", "", 9),
        ("DIR", '{"max_new_tokens": 70}', 70),
    ],
)
def test_what_limits_the_output(tmp_path: Path, source: str, override: str, limit: int | None) -> None:
    """As in vLLM: a folder or an override does, a model's own file does not."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 9}))
    found = chosen(OWN, str(tmp_path) if source == "DIR" else source, override)
    assert found.max_output_tokens == limit
    assert limit is None or found.defaults["max_tokens"] == limit


@pytest.mark.parametrize(
    "override",
    ["{", "[]", '{"temperatur": 1}', '{"temperature": "hot"}', '{"top_k": true}', '{"top_p": null}', '{"top_k": 1.5}']
    + ['{"temperature": -1}', '{"top_p": 0}', '{"top_p": 1.1}', '{"min_p": 2}', '{"repetition_penalty": 0}']
    + ['{"max_new_tokens": 0}', '{"temperature": NaN}', '{"temperature": 1e999}', '{"top_k": -2}'],
)
def test_what_is_no_default_is_refused(override: str) -> None:
    with pytest.raises(ModelFilesError, match="--override-generation-config: "):
        chosen(OWN, "auto", override)


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelFilesError, match="--generation-config"):
        chosen(OWN, "/nowhere", "")


def test_a_model_without_the_file_says_it_in_its_configuration(tmp_path: Path) -> None:
    found = of_model(tmp_path, {"temperature": 0.5, "eos_token_id": [2, 3], "num_beams": 4})
    assert found == GenerationConfig(defaults={"temperature": 0.5}, eos_token_ids=(2, 3))
    (tmp_path / "generation_config.json").write_text("{}")
    assert of_model(tmp_path, {"temperature": 0.5, "eos_token_id": 2}) == GenerationConfig(eos_token_ids=(2,))


@pytest.mark.parametrize("name", NAMED)
def test_what_is_not_applied_is_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.5, name: NAMED[name]}))
    assert of_model(tmp_path, {}).notes == (f"{file}: not applied: {name}",)
    neutral = NEUTRAL.get(name)
    file.write_text(json.dumps({"temperature": 0.5, name: neutral}))
    assert of_model(tmp_path, {}).notes == ()


def test_greedy_defaults_are_not_silently_lost(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    assert "do_sample false is not applied" in of_model(tmp_path, {}).notes[0]
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0}')
    assert of_model(tmp_path, {}).notes == ()


def test_every_setting_of_transformers_is_known() -> None:
    import transformers

    known = NEEDLESS | RANGES.keys() | NAMED.keys() | {"eos_token_id"}
    assert set(transformers.GenerationConfig().to_dict()) <= known


@pytest.mark.parametrize(
    ("ids", "of_tokenizer", "ends", "said"),
    [
        ((1,), None, (1,), ""),
        ((1,), 1, (1,), ""),
        ((1,), 0, (1, 0), ""),
        ((1,), 10, (1,), "eos_token_id 10 is ignored: the vocabulary has the ids 0 to 9"),
        ((-1, 3, 99), None, (3,), "eos_token_id -1, 99 is ignored"),
    ],
)
def test_which_tokens_end_a_text(
    ids: tuple[int, ...], of_tokenizer: int | None, ends: tuple[int, ...], said: str
) -> None:
    found = with_eos(GenerationConfig(eos_token_ids=ids), of_tokenizer, 10)
    assert found.eos_token_ids == ends
    assert len(found.notes) == bool(said)
    assert said in "".join(found.notes)
