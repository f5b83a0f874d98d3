"""What one request may ask for at most: refused by name beyond it, and within it no message is too long for a frame."""

import pytest
from parsing import RESOLVED, VOCAB, ask, refused

from meshlm.frontend import limits
from meshlm.frontend.errors import HttpError
from meshlm.protocol.columns import pack_i32
from meshlm.protocol.text_edge import TextPrompt, TokenPrompt

IDS = list(range(VOCAB))
BIAS = {str(token): 1.0 for token in IDS}


def test_ids_count_once() -> None:
    """1,300,000 repetitions of what the vocabulary has were carried to every sequence."""
    for name in ("allowed_token_ids", "stop_token_ids"):
        sampling = ask("text", **{name: IDS * 50}).sampling
        assert getattr(sampling, name) == tuple(IDS)


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_lists_of_ids_count_for_each_sequence(name: str) -> None:
    fields: dict[str, object] = {name: BIAS if name == "logit_bias" else IDS}
    most = limits.MAX_LISTED_IDS // VOCAB
    assert ask("text", **fields, prompt=["x"] * most).prompts == [TextPrompt("x")] * most
    error, shown = refused("text", {**fields, "prompt": ["x"] * (most // 2 + 1), "n": 2})
    assert (error.status, shown["param"]) == (400, name)
    assert f"at most {limits.MAX_LISTED_IDS}" in str(shown["message"])


def test_the_lists_count_together() -> None:
    fields = {"prompt": ["x"] * 200, "stop_token_ids": IDS}
    ask("text", **fields)
    assert refused("text", {**fields, "logit_bias": BIAS})[1]["param"] == "stop_token_ids"


@pytest.mark.parametrize(
    ("name", "value"), [("stop", ["é" * 2048] * 4), ("cache_salt", "s" * (1 << 14))], ids=["stop", "cache_salt"]
)
def test_texts_that_every_sequence_carries(name: str, value: object) -> None:
    ask("text", prompt=["x"] * 256, **{name: value})
    error, shown = refused("text", {"prompt": ["x"] * 257, name: value})
    assert (error.status, shown["param"]) == (400, name)
    assert f"at most {limits.MAX_COPIED_BYTES}" in str(shown["message"])


def test_a_prompt_that_no_context_holds_is_refused_before_it_travels() -> None:
    too_many = [5] * (RESOLVED.max_model_len + 1)
    error, shown = refused("text", {"prompt": [[5], too_many]})
    assert (error.status, shown["param"]) == (400, "prompt")
    assert "maximum context length" in str(shown["message"])
    assert ask("text", prompt=too_many, truncate_prompt_tokens=3).prompts == [TokenPrompt(pack_i32(too_many))]


def test_a_prompts_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MIN_PROMPT_BYTES", 100)
    monkeypatch.setattr(limits, "BYTES_PER_TOKEN", 0)
    assert ask("text", prompt="ü" * 50).prompts == [TextPrompt("ü" * 50)]
    assert refused("text", {"prompt": "ü" * 51})[1]["param"] == "prompt"
    ask("chat")
    tools = {"messages": [{"role": "user", "content": "x" * 101}]}
    assert refused("chat", tools)[1]["param"] == "messages"


def test_detokenize() -> None:
    limits.check_detokenize(limits.MAX_DETOKENIZE_IDS, RESOLVED)
    with pytest.raises(HttpError, match=f"^tokens: 869000 ids; at most {limits.MAX_DETOKENIZE_IDS} in one request$"):
        limits.check_detokenize(869_000, RESOLVED)
