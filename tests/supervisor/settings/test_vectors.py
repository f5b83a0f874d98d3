"""Which models give vectors, how they are made, and which flags do not go with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from meshlm.protocol.pool import PoolKind
from meshlm.protocol.pooling import PoolingSpec
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
QWEN3 = {**SIZES, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2, "max_position_embeddings": 512}
SCORE = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}


def pooling(folder: Path, config: dict[str, Any], **settings: Any) -> PoolingSpec | None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    given = {"model": str(folder), "device": "cpu", "load_format": "dummy", **settings}
    resolved = resolve.resolve(flags.build(given, None)).resolved
    assert resolved is not None
    return resolved.pooling


@pytest.mark.parametrize(
    ("settings", "serves"),
    [
        ({}, False),
        ({"runner": "generate"}, False),
        ({"runner": "pooling"}, True),
        ({"convert": "embed"}, True),
        ({"task": "embed"}, True),
        ({"task": "generate"}, False),
        ({"hf_overrides": json.dumps(SCORE)}, True),
    ],
)
def test_who_gives_vectors(tmp_path: Path, settings: dict[str, Any], serves: bool) -> None:
    assert (pooling(tmp_path, QWEN3, **settings) is not None) == serves


GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 300,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}


@pytest.mark.parametrize(
    ("architecture", "settings", "tasks"),
    [
        ("GPT2LMHeadModel", {}, ()),
        ("GPT2LMHeadModel", {"runner": "generate"}, ()),
        ("GPT2LMHeadModel", {"runner": "pooling"}, ("embed", "token_embed")),
        ("GPT2Model", {}, ("embed", "token_embed")),
        ("GPT2ForSequenceClassification", {}, ("classify", "token_classify")),
        ("GPT2ForTokenClassification", {}, ("token_classify",)),
    ],
)
def test_the_registry_says_what_a_family_does_and_not_how_its_name_is_spelled(
    tmp_path: Path, architecture: str, settings: dict[str, Any], tasks: tuple[str, ...]
) -> None:
    found = pooling(tmp_path, {**GPT2, "architectures": [architecture]}, **settings)
    assert (() if found is None else found.tasks) == tasks


def test_logits_that_are_more_than_a_product_are_no_classifier(tmp_path: Path) -> None:
    """Their rows alone would leave out what multiplies or caps them."""
    config = {**QWEN3, "architectures": ["CohereForCausalLM"], "logit_scale": 0.5, "num_key_value_heads": 4}
    with pytest.raises(UsageError, match="logits of CohereForCausalLM are more than a product"):
        pooling(tmp_path, config, runner="pooling", pooler_config=RETURNED)


def test_what_they_are(tmp_path: Path, minilm: Path) -> None:
    last = pooling(tmp_path, QWEN3, runner="pooling")
    assert last is not None
    assert (last.tasks, last.kind, last.activation, last.size) == (("embed", "token_embed"), PoolKind.LAST, True, 64)
    config = '{"pooling_type": "MEAN", "use_activation": false, "dimensions": 16}'
    mean = pooling(
        tmp_path, QWEN3, runner="pooling", pooler_config=config, hf_overrides='{"matryoshka_dimensions": [16, 64]}'
    )
    assert mean is not None
    assert (mean.kind, mean.activation, mean.dimensions, mean.matryoshka_dimensions) == (
        PoolKind.MEAN,
        False,
        16,
        (16, 64),
    )
    auto = (
        '{"pooling_type": "auto", "use_activation": true, "enable_chunked_processing": true, "max_embed_len": 3072000}'
    )
    plain = '{"use_activation": true, "enable_chunked_processing": true, "max_embed_len": 3072000}'
    found = [pooling(tmp_path, QWEN3, runner="pooling", pooler_config=text) for text in (auto, plain)]
    assert found[0] == found[1], "auto is what the model's files say"
    every = pooling(tmp_path, QWEN3, runner="pooling", pooler_config='{"pooling_type": "ALL"}')
    assert every is not None
    assert every.tasks == ("token_embed", "embed")
    score = pooling(tmp_path, {**QWEN3, **SCORE})
    assert score is not None
    assert (score.tasks, score.size, score.labels) == (("classify", "token_classify"), 2, ("bad", "good"))
    steps = '{"pooling_type": "STEP", "step_tag_id": 7, "logit_mean": 0.5, "logit_sigma": 2}'
    by_step = pooling(tmp_path, {**QWEN3, **SCORE}, pooler_config=steps)
    assert by_step is not None
    assert (by_step.tasks[0], by_step.logit_mean, by_step.logit_sigma) == ("token_classify", 0.5, 2.0)
    assert [by_step.pool(task).step_tag_id for task in by_step.tasks] == [7, -1]
    good_or_bad = pooling(tmp_path, QWEN3, runner="pooling", pooler_config=RETURNED)
    assert good_or_bad is not None
    assert (good_or_bad.tasks, good_or_bad.size) == (("token_classify", "classify"), 2)
    assert good_or_bad.pool("token_classify").step_tag_id == 7


def test_reward_models_score_each_token(tmp_path: Path) -> None:
    """As in vLLM; that of processes each step of a solution, whose last token is known."""
    qwen2 = {**QWEN3, "architectures": ["Qwen2ForRewardModel"], "num_labels": 1}
    reward = pooling(tmp_path, qwen2)
    assert reward is not None
    assert (reward.tasks, reward.pool("token_classify").step_tag_id) == (("token_classify", "classify"), -1)
    last = pooling(tmp_path, qwen2, pooler_config='{"pooling_type": "LAST"}')
    assert last is not None
    assert last.tasks == ("classify", "token_classify")
    process = {**qwen2, "architectures": ["Qwen2ForProcessRewardModel"]}
    for config, tag in (
        ("", 151651),
        ('{"step_tag_id": 7, "pooling_type": "STEP"}', 7),
        ('{"pooling_type": "ALL"}', -1),
    ):
        steps = pooling(tmp_path, process, pooler_config=config)
        assert steps is not None
        assert (steps.tasks[0], steps.pool("token_classify").step_tag_id) == ("token_classify", tag)


RETURNED = '{"pooling_type": "STEP", "step_tag_id": 7, "returned_token_ids": [2, 5]}'
BAD = [
    ({"runner": "generate", "convert": "embed"}, "--convert embed: it needs --runner pooling"),
    ({"runner": "generate", "task": "embed"}, "--task embed: it is --runner pooling, not generate"),
    ({"convert": "classify"}, "--convert classify: Qwen3ForCausalLM has no classifier"),
    ({"convert": "reward"}, "--convert reward: Qwen3ForCausalLM has no head for rewards"),
    ({"pooler_config": "{}x"}, "--pooler-config: JSON is malformed"),
    ({"pooler_config": '{"pooling_type": "CLS"}'}, "--pooler-config: it needs --runner pooling"),
    ({"runner": "pooling", "pooler_config": '{"normalize": true}'}, "unknown field `normalize`"),
    ({"runner": "pooling", "pooler_config": '{"step_tag_id": 1}'}, "step_tag_id needs pooling_type STEP"),
    ({"runner": "pooling", "pooler_config": '{"step_tag_id": -1, "pooling_type": "STEP"}'}, ">= 0"),
    (
        {"runner": "pooling", "pooler_config": '{"returned_token_ids": [1]}'},
        "returned_token_ids needs pooling_type STEP",
    ),
    ({"runner": "pooling", "pooler_config": '{"returned_token_ids": [-1]}'}, ">= 0"),
    ({"pooler_config": RETURNED}, "--pooler-config: it needs --runner pooling"),
    ({"convert": "embed", "pooler_config": RETURNED}, "makes scores, and does not go with --convert embed"),
    ({"runner": "pooling", "pooler_config": RETURNED.replace("[2", "[300")}, "the vocabulary has 300 tokens"),
    ({"runner": "pooling", "pooler_config": RETURNED, "tensor_parallel_size": 2}, "need the whole output projection"),
    (
        {"runner": "pooling", "pooler_config": RETURNED, "hf_overrides": json.dumps(SCORE)},
        "Qwen3ForSequenceClassification is none",
    ),
    ({"runner": "pooling", "pooler_config": '{"logit_mean": 1}'}, "are of a classifier; the model embeds"),
    ({"runner": "pooling", "pooler_config": '{"logit_sigma": 0}'}, "logit_sigma must not be 0"),
    (
        {"runner": "pooling", "pooler_config": '{"pooling_type": "CLS", "seq_pooling_type": "CLS"}'},
        "exclude each other",
    ),
    ({"runner": "pooling", "pooler_config": '{"dimensions": 65}'}, "an embedding has 64 numbers"),
    ({"runner": "pooling", "pooler_config": '{"task": "classify"}'}, "the model has no task classify; it has embed"),
    ({"runner": "pooling", "hf_overrides": '{"matryoshka_dimensions": [65]}'}, "matryoshka_dimensions must be"),
    ({"hf_overrides": "[1]"}, "--hf-overrides: not a JSON object"),
]


@pytest.mark.parametrize(("settings", "said"), [*BAD])
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    if settings.get("pooler_config") == "{}x":
        settings = {**settings, "runner": "pooling"}
    with pytest.raises(UsageError) as told:
        pooling(tmp_path, QWEN3, **settings)
    assert said in str(told.value)


ENCODER = [
    ({"runner": "generate"}, "--runner generate: BertModel gives vectors, and no text"),
    ({"tensor_parallel_size": 2}, "one worker has all of an encoder"),
    (
        {"max_num_batched_tokens": 200, "max_num_seqs": 8},
        "an encoder's prompts are not split, so at least --max-model-len (256)",
    ),
    ({"max_model_len": 513}, "the model's context is 512"),
]


@pytest.mark.parametrize(("settings", "said"), ENCODER)
def test_what_encoders_have_not(minilm: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as told:
        resolve.resolve(flags.build({"model": str(minilm), "device": "cpu", **settings}, None))
    assert said in str(told.value)


def test_the_context_of_an_encoder(minilm: Path) -> None:
    """sentence-transformers' max_seq_length, unless the user says more."""
    for settings, length in (({}, 256), ({"max_model_len": 512}, 512)):
        resolved = resolve.resolve(flags.build({"model": str(minilm), "device": "cpu", **settings}, None)).resolved
        assert resolved is not None
        assert resolved.max_model_len == length
