"""A model that drafts for another: the text is the other's own, and where both are the same model every draft is right."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from cpu_steps import BLOCK, LENGTH, MODEL, PROMPTS, tokens_of
from drafted_steps import Text, add, begun, decode, plain, row_of, verify

from meshlm.protocol.kv import FullAttention
from meshlm.protocol.sampling import SamplingParams
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine
from meshlm.workers.speculative.model_drafter import CHUNK

TOKENS, MOST = 14, 4
SMALLER = {
    **MODEL,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_size": 32,
}
DRAFTERS: dict[str, dict[str, Any]] = {"itself": {}, "alike": {"num_hidden_layers": 3}, "smaller": SMALLER}
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=7, top_k=40, top_p=0.9),
    SamplingParams(
        temperature=0.7, seed=3, repetition_penalty=1.3, presence_penalty=0.5, bad_words_token_ids=((7, 8),)
    ),
]


def folder_of(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, **changes}))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    return folder


def settings_of(folder: Path, **values: object) -> dict[str, object]:
    found: dict[str, object] = {"model": str(folder), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    return found | {"max_model_len": LENGTH, "max_num_seqs": 4, "cpu_threads": 1, "block_size": BLOCK} | values


def speculative(drafter: Path) -> str:
    return json.dumps({"method": "draft_model", "model": str(drafter), "num_speculative_tokens": MOST})


@pytest.fixture(scope="module", params=DRAFTERS)
def drafting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ModelEngine]]:
    folder = tmp_path_factory.mktemp("models")
    drafter = folder_of(folder / "drafter", **DRAFTERS[request.param])
    values = settings_of(folder_of(folder / "model"), speculative_config=speculative(drafter))
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    yield request.param, make_engine(resolve.resolve(flags.build(values, None)), lambda *progress: None)
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)


def test_the_text_is_the_models_own(drafting: tuple[str, ModelEngine]) -> None:
    name, made = drafting
    expected = plain(made, KINDS, TOKENS + MOST)
    texts, drafted, got = begun(made, KINDS), 0, 0
    while min(len(text.tokens) for text in texts) < TOKENS:
        before = [len(text.tokens) for text in texts]
        result = decode(made, [0, 1, 2], [MOST, 2, MOST])
        add(texts, result, [0, 1, 2])
        drafted += int(np.frombuffer(result.drafted, np.int32).sum())
        got += sum(len(text.tokens) for text in texts) - sum(before) - 3
    for text, wanted in zip(texts, expected, strict=True):
        count = min(len(text.tokens), len(wanted.tokens))
        assert text.tokens[:count] == wanted.tokens[:count]
    assert drafted
    if name == "itself":
        assert got == drafted, "it draws as the model does, with the same numbers"


def test_what_was_not_drafted_for_long_is_made_up(drafting: tuple[str, ModelEngine]) -> None:
    """Rows of which nothing was drafted lack their last tokens in the drafter's caches."""
    name, made = drafting
    texts = begun(made, KINDS)
    for _ in range(5):
        add(texts, decode(made, [0, 1, 2], [0, 0, 0]), [0, 1, 2])
    result = decode(made, [0, 1, 2], [MOST, 0, MOST])
    if name == "itself":
        assert np.frombuffer(result.counts, np.int32).tolist() == [1 + MOST, 1, 1 + MOST]


def test_a_longer_gap_than_a_pass_has(drafting: tuple[str, ModelEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshlm.workers.speculative.model_drafter.CHUNK", 2)
    test_what_was_not_drafted_for_long_is_made_up(drafting)
    assert CHUNK > 2


def test_a_prefix_from_the_cache(drafting: tuple[str, ModelEngine]) -> None:
    """A request finds blocks of another, with what the drafter has there."""
    name, made = drafting
    prompt, params = PROMPTS[2], KINDS[0]
    texts = begun(made, [params] * 3)
    for _ in range(TOKENS):
        add(texts, decode(made, [2], [0]), [2])
    start = len(prompt) // BLOCK * BLOCK
    again = row_of(made, 2, prompt, len(prompt), params)
    found = tokens_of(verify(made, [(2, start, len(prompt) - start)], [0], (again,)))
    text = Text(list(found), [])
    while len(text.tokens) < TOKENS - MOST:
        result = decode(made, [2], [MOST])
        text.tokens.extend(tokens_of(result))
        if name == "itself":
            assert np.frombuffer(result.counts, np.int32).tolist() == [1 + MOST]
    assert text.tokens == texts[2].tokens[: len(text.tokens)]


def test_its_layers_are_in_groups_of_their_own_only_where_their_heads_differ(drafting: tuple[str, ModelEngine]) -> None:
    name, made = drafting
    groups = {FullAttention(), FullAttention(of_draft=True)} if name == "smaller" else {FullAttention()}
    assert set(made.facts.kv_specs) == groups
    assert made.facts.max_drafts == MOST
    assert len(made.compute.caches) == 2 + DRAFTERS[name].get("num_hidden_layers", 2)


def test_behind_a_sleep_it_drafts_as_before(drafting: tuple[str, ModelEngine]) -> None:
    _, made = drafting
    texts = begun(made, KINDS)
    expected = plain(made, KINDS, TOKENS)
    made.be_without(("weights", "kv_cache"))
    made.be_without(())
    texts = begun(made, KINDS)
    add(texts, decode(made, [0, 1, 2], [MOST] * 3), [0, 1, 2])
    for text, wanted in zip(texts, expected, strict=True):
        assert text.tokens == wanted.tokens[: len(text.tokens)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 99}, "its vocabulary has 99 tokens, that of .* 211"),
        ({"max_position_embeddings": 64}, "its context is 64; give --max-model-len 64 at most"),
    ],
)
def test_what_cannot_draft_is_refused_by_name(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    drafter = folder_of(tmp_path / "drafter", **changes)
    values = settings_of(folder_of(tmp_path / "model"), speculative_config=speculative(drafter))
    with pytest.raises(UsageError, match=f"{said}$") as raised:
        resolve.resolve(flags.build(values, None))
    assert "\n" not in str(raised.value)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    drafter, model = folder_of(tmp_path / "drafter"), folder_of(tmp_path / "model")
    for folder, vocabulary in ((drafter, {"a": 0, "b": 1}), (model, {"b": 0, "a": 1})):
        tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a")).save(str(folder / "tokenizer.json"))
    values = settings_of(model, speculative_config=speculative(drafter))
    with pytest.raises(
        UsageError, match=r"^--speculative-config: model .*: its tokenizer has other tokens than that of "
    ):
        resolve.resolve(flags.build(values, None))
