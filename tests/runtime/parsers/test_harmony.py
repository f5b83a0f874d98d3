"""The channels of gpt-oss: by example, for any cut of the text, and without loss of text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.runtime.parsers import registry
from meshlm.runtime.parsers.calls import Call, joined
from meshlm.runtime.parsers.harmony import TAGS, Channels, Reasoned

TOOLS: dict[str, dict[str, object]] = {"weather": {}}
THINKS = "<|channel|>analysis<|message|>hm<|end|>"
SAYS = "<|start|>assistant<|channel|>final<|message|>Yes"
ASKS = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
BERN = '{"city": "<|end|"}'
CITY = Call("weather", BERN)
EXAMPLES: list[tuple[str, str, str, list[Call]]] = [
    (THINKS + SAYS, "hm", "Yes", []),
    (f"{THINKS}{SAYS}<|return|>", "hm", "Yes", []),
    (f"{THINKS}{ASKS}{BERN}<|call|>", "hm", "", [CITY]),
    (f"{THINKS}{ASKS}{BERN}<|call|>{ASKS}{BERN}", "hm", "", [CITY, CITY]),
    (f"{THINKS}<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{BERN}", "hm", "", [CITY]),
    (f"{THINKS}{ASKS}<|call|>", "hm", "", [Call("weather", "{}")]),
    (f"{THINKS}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>{ASKS}{BERN}", "hm", "I look.", [CITY]),
    (f"{THINKS}<|start|>assistant{THINKS}{SAYS}", "hm\nhm", "Yes", []),
    ("<|channel|>analysis to=browser.search code<|message|>{}<|call|>", "{}", "", []),
    ("<|channel|>analysis<|message|>h", "h", "", []),
    ("<|message|>Yes", "", "Yes", []),
    ("Yes, I can", "", "Yes, I can", []),
    ("<|channel|>analysis", "", "<|channel|>analysis", []),
    ("<|channel|>final<|end|>Yes", "", "<|channel|>finalYes", []),
    ("", "", "", []),
]


def read(pieces: list[str], *, opened: bool = False) -> tuple[str, str, list[Call]]:
    channels = Channels(TOOLS, opened=opened)
    parts = [part for piece in pieces for part in channels.push(piece)] + channels.finish()
    content, calls = joined(part for part in parts if not isinstance(part, Reasoned))
    return "".join(part.text for part in parts if isinstance(part, Reasoned)), content, calls


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), EXAMPLES)
def test_examples_whole_and_by_letter(text: str, reasoning: str, content: str, calls: list[Call]) -> None:
    assert read([text]) == read(list(text)) == (reasoning, content, calls)


def test_a_final_message_that_is_gone_on_with() -> None:
    assert read(["Yes<|end|>", THINKS], opened=True) == ("hm", "Yes", [])


@given(st.lists(st.sampled_from([*TAGS, THINKS, SAYS, ASKS, BERN, "to=", "%", "analysis", " "]), max_size=8), st.data())
def test_cuts_change_nothing_and_no_text_is_lost(words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    reasoning, content, calls = read([text])
    assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]) == (reasoning, content, calls)
    heads = text.count("%") - (reasoning + content + "".join(call.arguments for call in calls)).count("%")
    assert heads == 0 or "<|message|>" in text  # the head of a message is nobody's text


@pytest.mark.parametrize("pair", [("openai", ""), ("openai", "qwen3"), ("hermes", "openai_gptoss")])
def test_channels_are_read_by_both_parsers_or_none(pair: tuple[str, str]) -> None:
    with pytest.raises(registry.ParserError, match="the channels of gpt-oss need"):
        registry.check_pair(*pair)


@pytest.mark.parametrize("pair", [("openai", "openai_gptoss"), ("", "openai_gptoss"), ("hermes", "qwen3"), ("", "")])
def test_pairs_that_fit(pair: tuple[str, str]) -> None:
    registry.check_pair(*pair)
