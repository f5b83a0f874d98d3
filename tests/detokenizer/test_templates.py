"""Prompts are what transformers' apply_chat_template makes of the same messages."""

import copy
import json
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pytest
from newer_template_families import NEWER
from template_families import COMMAND_R, FAMILIES, PARTS_ALONE
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from meshlm.detokenizer.encode import ContentFormat, Encoder
from meshlm.protocol.edges.text import ChatPrompt
from meshlm.runtime.errors import RequestError
from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.model_files.tokenizer_files import LoadedTokenizer

Json = dict[str, Any]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "<sep>"}
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wie ist's in Zürich & <überall>?",
            "parameters": {
                "type": "object",
                "required": ["city"],
                "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
            },
        },
    },
    {"type": "function", "function": {"name": "time", "description": "", "parameters": {"properties": {}}}},
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "a": [1, 2.5]}}}
SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": "Wetter in Zürich & Genf?\n"}
ANSWER = {"role": "assistant", "content": "Hm </think> Schön "}
DOCUMENTS = [{"title": "T <1>", "text": "ü"}, {"title": "U", "text": "v"}]
CONVERSATIONS: dict[str, list[Json]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, USER],
    "answered": [USER, ANSWER],
    "called": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    "result": [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"c": 21}'},
        {"role": "tool", "tool_call_id": "c2", "content": "x"},
    ],
    "calls": [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL, {**copy.deepcopy(CALL), "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "tool", "tool_call_id": "c2", "content": "y"},
        {"role": "assistant", "content": "Sonnig."},
        USER,
    ],
    "thought": [USER, {"role": "assistant", "reasoning": "so\n", "content": "Ja."}, USER],
}


ALL = {**FAMILIES, **NEWER}


def encoder(templates: dict[str, str], content_format: ContentFormat = "auto") -> Encoder:
    loaded = LoadedTokenizer(Tokenizer(models.BPE()), SPECIAL, frozenset(), True)
    return Encoder(loaded, templates, content_format)


def ours(
    source: str | dict[str, str],
    messages: list[Json],
    tools: list[Json] | None = None,
    goes_on: bool = False,
    content_format: ContentFormat = "auto",
    **extra: Any,
) -> str:
    sent = copy.deepcopy(messages)
    for message in sent:  # as OpenAI's clients send them
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    prompt = ChatPrompt(
        msgspec.json.encode(sent),
        msgspec.json.encode(tools) if tools else b"",
        template_kwargs_json=msgspec.json.encode(extra) if extra else b"",
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )
    return encoder({"default": source} if isinstance(source, str) else source, content_format).render(prompt)


def theirs(
    source: str | dict[str, str],
    messages: list[Json],
    tools: list[Json] | None = None,
    goes_on: bool = False,
    **extra: Any,
) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=source, **SPECIAL)
    text: str = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        tokenize=False,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        **extra,
    )
    return text


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", ALL)
def test_the_prompt_is_that_of_transformers(family: str, conversation: str, tools: list[Json] | None) -> None:
    messages = CONVERSATIONS[conversation]
    variables: Json = {"documents": DOCUMENTS, "enable_thinking": False, "date_string": "1 Jan 2020", "thinking": True}
    nothing: Json = {}
    for extra in (nothing, variables):
        try:
            expected = theirs(ALL[family], messages, tools, **copy.deepcopy(extra))
        except (jinja2.TemplateError, TypeError):
            with pytest.raises(RequestError, match="the chat template refuses"):
                ours(ALL[family], messages, tools, **extra)
        else:
            assert ours(ALL[family], messages, tools, **extra) == expected


def test_a_null_content_is_an_empty_one() -> None:
    """As for vLLM; with transformers many templates fail."""
    said: list[Json] = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    null: list[Json] = [USER, {**said[1], "content": None}]
    for family in NEWER:
        assert ours(ALL[family], null, TOOLS) == theirs(ALL[family], said, TOOLS)


GOES_ON = ["Once upon", "Once upon ", "s", "<|", "end", "assistant"]


@pytest.mark.parametrize("text", GOES_ON)
@pytest.mark.parametrize(
    "family", ["llama3", "qwen", "mistral", "hermes", "gemma2", "gemma3", "phi", "deepseek", *NEWER]
)
def test_a_message_goes_on_as_with_transformers(family: str, text: str) -> None:
    """Also where what the template puts behind it has the same letters."""
    messages = [USER, {"role": "assistant", "content": text}]
    assert ours(ALL[family], messages, goes_on=True) == theirs(ALL[family], messages, goes_on=True)


def test_an_empty_message_goes_on() -> None:
    messages = [USER, {"role": "assistant", "content": ""}]
    assert ours(FAMILIES["hermes"], messages, goes_on=True).endswith("<|im_start|>assistant\n")


def test_what_the_template_does_not_show_cannot_go_on() -> None:
    messages = [USER, {"role": "tool", "content": "x"}]
    with pytest.raises(RequestError, match="cannot be continued") as error:
        ours(FAMILIES["phi"], messages, goes_on=True)
    assert error.value.param == "continue_final_message"


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_tools_choose_the_template(tools: list[Json] | None) -> None:
    assert ours(COMMAND_R, [USER], tools) == theirs(COMMAND_R, [USER], tools)
    assert ("<|TOOLS|>" in ours(COMMAND_R, [USER], tools)) == (tools is not None)
    single = {"default": COMMAND_R["default"]}
    assert ours(single, [USER], tools) == theirs(single["default"], [USER], tools)


def test_a_request_can_name_a_template() -> None:
    prompt = ChatPrompt(
        msgspec.json.encode([USER]),
        chat_template="rag",
        template_kwargs_json=msgspec.json.encode({"documents": DOCUMENTS}),
    )
    assert encoder(COMMAND_R).render(prompt).startswith("<s>Document: 0\nT <1>")


def test_without_a_default_the_names_are_said() -> None:
    with pytest.raises(RequestError, match=r"no default chat template.*: rag, tool_use"):
        ours({name: COMMAND_R[name] for name in ("rag", "tool_use")}, [USER])


GEMMA = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}|{% endfor %}"
)
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}


@pytest.mark.parametrize(
    ("source", "content_format", "shown"),
    [
        (PARTS_ALONE, "auto", "<|user|>a;b;<|user|>hi;<|assistant|>"),  # text alone would be shown as nothing
        ("{% for m in messages %}{{ m.content }}|{% endfor %}", "auto", "a\nb|hi|"),
        (GEMMA, "auto", "ab|hi|"),
        (PARTS_ALONE, "openai", "<|user|>a;b;<|user|>hi;<|assistant|>"),
        ("{% for m in messages %}{{ m.content | length }}|{% endfor %}", "openai", "2|1|"),
        ("{% for m in messages %}{% set c = m['content'] %}{% for p in c[:] %}{{ p.text }}{% endfor %}{% endfor %}", "auto", "abhi"),
        ("{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}|{% endfor %}", "string", "a\nb|hi|"),
    ],
)  # fmt: skip
def test_content_is_text_or_parts_as_the_template_needs_it(
    source: str, content_format: ContentFormat, shown: str
) -> None:
    assert ours(source, [PARTS, {"role": "user", "content": "hi"}], content_format=content_format) == shown


# GLM 4.5's, in short: of a tool's content it knows text, and parts that are results, not parts of text.
RESULTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for r in m.content %}"
    "{{ r.output if r.output is defined else (r.name ~ '!' if r.type == 'tool_reference' else r) }}{% endfor %}{% endif %}|{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "content", "shown"),
    [
        (RESULTS, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb|"),
        (RESULTS, "a", "a|"),
        (RESULTS, [{"type": "tool_reference", "name": "f"}], "f!|"),
        (PARTS_ALONE, [{"type": "text", "text": "a"}], "<|tool|>a;<|assistant|>"),
        ("{{ messages[0].content }}", [{"type": "text", "text": "a"}, {"type": "tool_reference", "name": "f"}], "a\nf"),
    ],
)
def test_a_tools_result_is_text_where_the_template_takes_it(source: str, content: Any, shown: str) -> None:
    assert ours(source, [{"role": "tool", "tool_call_id": "1", "content": content}]) == shown


def test_a_message_of_parts_goes_on() -> None:
    messages: list[Json] = [USER, {**PARTS, "role": "assistant"}]
    assert ours(PARTS_ALONE, messages, goes_on=True).endswith("<|assistant|>a;b")


@pytest.fixture(scope="module")
def real(smollm2: Path) -> tuple[LoadedTokenizer, Any]:
    """A real vocabulary, for us and for transformers."""
    loaded = tokenizer_files.load(smollm2)
    return loaded, PreTrainedTokenizerFast(tokenizer_object=loaded.tokenizer, **loaded.special_tokens)


@pytest.mark.model
@pytest.mark.parametrize("family", ALL)
def test_the_prompts_tokens_are_those_of_transformers(real: tuple[LoadedTokenizer, Any], family: str) -> None:
    """Special tokens stand in templates and in messages."""
    (loaded, their), template = real, ALL[family]
    messages = [USER, ANSWER, {"role": "user", "content": "Say <|im_end|> and  \n\n<|im_start|>."}]
    prompt = ChatPrompt(
        msgspec.json.encode(messages), template_kwargs_json=msgspec.json.encode({"documents": DOCUMENTS})
    )
    expected = their.apply_chat_template(
        messages, chat_template=template, documents=DOCUMENTS, add_generation_prompt=True, return_dict=False
    )
    assert Encoder(loaded, {"default": template}).encode(prompt).tolist() == expected


MARKS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "assistant" %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.model
def test_the_tokens_that_a_template_marks_are_those_of_transformers(real: tuple[LoadedTokenizer, Any]) -> None:
    loaded, their = real
    answers = [{"role": "assistant", "content": text} for text in ("Schön é 漢字.", "", "  two\n\nlines ")]
    messages = [message for answer in answers for message in (USER, answer)]
    expected = their.apply_chat_template(
        messages, chat_template=MARKS, add_generation_prompt=True, return_dict=True, return_assistant_tokens_mask=True
    )
    marking, plain = Encoder(loaded, {"default": MARKS}), Encoder(loaded, {"default": next(iter(FAMILIES.values()))})
    prompt = ChatPrompt(msgspec.json.encode(messages))
    ids, mask = marking.assistant_mask(prompt)
    assert ids == marking.encode(prompt)
    assert (ids.tolist(), list(mask)) == (expected["input_ids"], expected["assistant_masks"])
    assert 0 < sum(mask) < len(ids)
    assert plain.assistant_mask(prompt) == (plain.encode(prompt), b"")
    goes_on = ChatPrompt(msgspec.json.encode(messages[:2]), add_generation_prompt=False, continue_final_message=True)
    ids, mask = marking.assistant_mask(goes_on)
    assert (
        loaded.tokenizer.decode([token for token, marked in zip(ids, mask, strict=True) if marked]) == "Schön é 漢字."
    )
