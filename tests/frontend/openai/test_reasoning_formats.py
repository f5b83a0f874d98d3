"""Each form of reasoning by example, for any cut of the text, and calls of each format that begin in it."""

import pytest
from answering import STOP, asking, body, give, whole
from hypothesis import given
from hypothesis import strategies as st
from parsing import asked, body_of
from tool_formats import SAME_AS

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.extras import find_extra
from meshlm.protocol.grammar import Grammar, GrammarKind, ThinkingBudget
from meshlm.runtime.parsers import budgets
from meshlm.runtime.parsers.calls import Call, ToolParser, joined
from meshlm.runtime.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, reasoning_parser
from meshlm.runtime.parsers.splitter import Splitter

TOOLS: dict[str, dict[str, object]] = {"time": {}}
GRANITE = "Here is my thought process:"
SAID: list[tuple[str, str, str, str]] = [
    ("deepseek_r1", "hm</think>Yes", "hm", "Yes"),
    ("qwen3", "<think>\nhm</think>Yes", "\nhm", "Yes"),
    ("glm45", "<think>hm</think>Yes", "hm", "Yes"),
    ("mistral", "[THINK]hm[/THINK]Yes", "hm", "Yes"),
    ("mistral", "Yes [THINK]", "", "Yes [THINK]"),
    ("mistral", "[THINK]hm", "hm", ""),
    ("mistral", " [THI", "", " [THI"),
    ("granite", f"{GRANITE} hm Here is my response: Yes", " hm ", " Yes"),
    ("granite", "Here is a", "", "Here is a"),
    ("seed_oss", "<seed:think>hm</seed:think>Yes", "hm", "Yes"),
    ("gemma4", "<|channel>thought\nhm<channel|>Yes", "hm", "Yes"),
    ("gemma4", "Yes", "", "Yes"),
    ("cohere_command3", "<|START_THINKING|>hm<|END_THINKING|>Yes", "hm", "Yes"),
    ("hunyuan_a13b", "<think>\nhm\n</think>\n<answer>\nYes", "hm", "<answer>\nYes"),
    ("minimax_m3", "<mm:think>hm</mm:think>Yes", "hm", "Yes"),
    ("<a>...</a>", "\n<a>hm</a>Yes</a>", "hm", "Yes</a>"),
    ("<a>...</a>", "", "", ""),
]
NAMES = [name for name, form in REASONING_PARSERS.items() if not (form.channels or form.begins_content)] + [
    "<a>...</a>"
]
# A call without arguments in each format whose calls stand between tags.
CALLS = {
    "apertus": '<|tools_prefix|>[{"time": {}}]<|tools_suffix|>',
    "cohere_command3": '<|START_ACTION|>[{"tool_name": "time", "parameters": {}}]<|END_ACTION|>',
    "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="time"></｜DSML｜invoke></｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls><｜DSML｜invoke name="time"></｜DSML｜invoke></｜DSML｜tool_calls>',
    "gemma": "```tool_code\ntime()\n```",
    "gemma4": "<|tool_call>call:time{}<tool_call|>",
    "gigachat3": '<|function_call|>{"name": "time", "arguments": {}}',
    "hy_v3": "<tool_calls><tool_call>time<tool_sep></tool_call></tool_calls>",
    "lfm2": "<|tool_call_start|>[time()]<|tool_call_end|>",
    "minicpm5": '<function name="time"></function>',
    "olmo3": "<function_calls>time()</function_calls>",
    "seed_oss": "<seed:tool_call><function=time></function></seed:tool_call>",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="time"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "functiongemma": "<start_function_call>call:time{}<end_function_call>",
    "glm45": "<tool_call>time</tool_call>",
    "hermes": '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
    "internlm": '<|action_start|><|plugin|>{"name": "time", "parameters": {}}<|action_end|>',
    "jamba": '<tool_calls>[{"name": "time", "arguments": {}}]</tool_calls>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.time:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "longcat": '<longcat_tool_call>{"name": "time", "arguments": {}}</longcat_tool_call>',
    "minimax_m2": '<minimax:tool_call><invoke name="time"></invoke></minimax:tool_call>',
    "granite": '<|tool_call|>[{"name": "time", "arguments": {}}]',
    "granite-20b-fc": '<function_call>{"name": "time", "arguments": {}}',
    "mistral": "[TOOL_CALLS]time[ARGS]{}",
    "phi4_mini_json": 'functools[{"name": "time", "arguments": {}}]',
    "qwen3_coder": "<tool_call><function=time></function></tool_call>",
}


def split(parser: str, pieces: list[str], calls: ToolParser | None = None) -> tuple[str, str, list[Call]]:
    """The reasoning, the content, and calls that begin in the reasoning."""
    splitter = Splitter(reasoning_parser(parser), calls, TOOLS)
    said = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    content, found = joined([part for thought in said for part in thought.parts])
    return "".join(thought.reasoning for thought in said), content + "".join(thought.rest for thought in said), found


@pytest.mark.parametrize(("parser", "text", "reasoning", "content"), SAID)
def test_examples_whole_and_by_letter(parser: str, text: str, reasoning: str, content: str) -> None:
    assert split(parser, [text]) == split(parser, list(text)) == (reasoning, content, [])


@pytest.mark.parametrize("parser", NAMES)
@given(st.data())
def test_cuts_change_nothing_and_no_text_is_lost(parser: str, data: st.DataObject) -> None:
    form, calls = reasoning_parser(parser), TOOL_PARSERS[data.draw(st.sampled_from(sorted(CALLS)))]
    own = [form.open, form.close, form.open[:3], form.close[:4], *calls.tags, *CALLS.values(), "%", " ", "\n"]
    text = "".join(data.draw(st.lists(st.sampled_from(own), max_size=7)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    reasoning, content, found = split(parser, [text], calls)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert split(parser, pieces, calls) == (reasoning, content, found)
    said = reasoning + content + "".join(call.arguments for call in found)
    assert said.count("%") == text.count("%")


def test_each_format_with_tags_is_tried() -> None:
    assert set(CALLS) | set(SAME_AS) >= {name for name, parser in TOOL_PARSERS.items() if parser.ends_reasoning}


@pytest.mark.parametrize("parser", CALLS)
def test_a_call_that_begins_in_the_reasoning_ends_it(parser: str) -> None:
    """Its tag may also be spoken of, and the closing tag of the reasoning that follows it is nobody's."""
    spoken = f"I could use {CALLS[parser][:12]} here "
    ask = asking(True, tool_call_parser=parser, begins_with_reasoning=True, tools=TOOLS)
    answer, _ = whole(ask)
    give(answer, 0, [7], f"{spoken}{CALLS[parser]}</think>Yes", STOP)
    (choice,) = body(answer)["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == (spoken, "Yes")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "time", "arguments": "{}"}]
    (own,) = [call["id"] for call in message["tool_calls"]]
    assert (own == "functions.time:0") == (parser == "kimi_k2")


def test_a_closing_tag_in_the_arguments_of_such_a_call_is_theirs() -> None:
    ask = asking(True, tool_call_parser="hermes", begins_with_reasoning=True, tools=TOOLS)
    answer, _ = whole(ask)
    give(answer, 0, [7], 'hm <tool_call>{"name": "time", "arguments": {"a": "</think>"}}</tool_call></think>Yes', STOP)
    message = body(answer)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm ", "Yes")
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "</think>"}'


def test_ids_of_mistrals_calls_have_nine_letters() -> None:
    answer, _ = whole(asking(True, tool_call_parser="mistral", tools=TOOLS))
    give(answer, 0, [7], "[TOOL_CALLS]time[ARGS]{}[TOOL_CALLS]time[ARGS]{}", STOP)
    found = [call["id"] for call in body(answer)["choices"][0]["message"]["tool_calls"]]
    assert len(set(found)) == 2
    assert all(len(own) == 9 and own.isalnum() for own in found)


def test_a_message_that_is_gone_on_with_in_its_reasoning() -> None:
    """The opening text stands in the prompt, so the answer has none."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "[THINK]I "}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    ask = asked("chat", body_of("chat", fields), server=ServerConfig(reasoning_parser="mistral"))
    answer, _ = whole(
        asking(
            True,
            begins_with_reasoning=ask.answer.begins_with_reasoning,
            reasoning_parser=ask.answer.reasoning_parser,
            opened_reasoning=ask.answer.opened_reasoning,
        )
    )
    give(answer, 0, [7], "think[/THINK]Yes", STOP)
    message = body(answer)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("think", "Yes")


@pytest.mark.parametrize(("parser", "reasoning"), [("mistral", None), ("qwen3", "Yes")])
def test_an_answer_without_the_opening_text(parser: str, reasoning: str | None) -> None:
    answer, _ = whole(asking(True, begins_with_reasoning=True, reasoning_parser=parser))
    give(answer, 0, [7], "Yes", STOP)
    message = body(answer)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (reasoning, None if reasoning else "Yes")


@pytest.mark.parametrize(
    ("parser", "text", "message"),
    [
        ("ernie45", "hm</think>\n<response>\nYes\n</response>\n", ("hm", "\n\nYes\n\n")),
        (
            "ernie45",
            'hm</think>Yes<tool_call>{"name": "time", "arguments": {"a": "<response>"}}</tool_call>',
            ("hm", "Yes"),
        ),
        ("hunyuan_a13b", "<think>\nhm\n</think>\n<answer>\nYes\n</answer>", ("hm", "Yes")),
        ("minimax_m2_append_think", "hm</think>Yes", (None, "<think>hm</think>Yes")),
    ],
)
def test_content_that_is_not_what_the_model_writes(parser: str, text: str, message: tuple[str | None, str]) -> None:
    server = ServerConfig(reasoning_parser=parser, enable_auto_tool_choice=True, tool_call_parser="hermes")
    tools = [{"type": "function", "function": {"name": "time"}}]
    ask = asked("chat", body_of("chat", {"tools": tools}), server=server)
    for size in (1, 1000):
        answer, _ = whole(ask)
        for at in range(0, len(text), size):
            give(answer, 0, [7], text[at : at + size])
        give(answer, 0, [2], "", STOP)
        found = body(answer)["choices"][0]["message"]
        assert (found["reasoning"], found["content"]) == message
        assert [call["function"]["arguments"] for call in found.get("tool_calls", ())] == ['{"a": "<response>"}'] * (
            "tool_call" in text
        )


@pytest.mark.parametrize(
    ("parser", "kwargs", "reasons"),
    [
        ("deepseek_r1", {"enable_thinking": False}, True),
        ("qwen3", {}, True),
        ("qwen3", {"enable_thinking": False}, False),
        ("deepseek_v3", {}, False),
        ("deepseek_v3", {"thinking": True}, True),
        ("holo2", {}, True),
        ("hy_v3", {}, False),
        ("hy_v3", {"reasoning_effort": "high"}, True),
        ("hy_v3", {"reasoning_effort": "no_think"}, False),
        ("minimax_m2_append_think", {}, False),
        ("openai_gptoss", {"enable_thinking": False}, True),
    ],
)
def test_which_answers_may_begin_with_reasoning(parser: str, kwargs: dict[str, object], reasons: bool) -> None:
    ask = asked("chat", body_of("chat", {"chat_template_kwargs": kwargs}), server=ServerConfig(reasoning_parser=parser))
    assert ask.answer.begins_with_reasoning == reasons


def test_a_template_that_opens_the_reasoning() -> None:
    server = ServerConfig(reasoning_parser="minimax_m3")
    ask = asked("chat", body_of("chat", {"chat_template_kwargs": {"thinking_mode": "enabled"}}), server=server)
    answer, _ = whole(ask)
    give(answer, 0, [7], "hm</mm:think>Yes", STOP)
    assert body(answer)["choices"][0]["message"]["reasoning"] == "hm"


def budget_of(parser: str, **fields: object) -> ThinkingBudget | None:
    ask = asked(
        "chat", body_of("chat", {"thinking_token_budget": 7, **fields}), server=ServerConfig(reasoning_parser=parser)
    )
    grammar = find_extra(ask.mesh.extras, Grammar)
    return None if grammar is None else grammar.thinking


def test_a_budget_of_reasoning() -> None:
    """It is a part of the answer's constraint, which may be none but it."""
    assert budget_of("qwen3") == ThinkingBudget(7, "</think>", "<think>")
    assert budget_of("mistral") == ThinkingBudget(7, "[/THINK]", "[THINK]", assumed=False)
    assert budget_of("minimax_m3", chat_template_kwargs={"thinking_mode": "enabled"}) == ThinkingBudget(
        7, "</mm:think>"
    )
    assert budget_of("qwen3", chat_template_kwargs={"enable_thinking": False}) is None
    assert budget_of("qwen3", thinking_token_budget=-1) is None
    both = body_of("chat", {"thinking_token_budget": 0, "response_format": {"type": "json_object"}})
    grammar = find_extra(asked("chat", both, server=ServerConfig(reasoning_parser="qwen3")).mesh.extras, Grammar)
    assert grammar is not None
    assert (grammar.kind, grammar.begins_after) == (GrammarKind.JSON_OBJECT, "</think>")
    assert grammar.thinking == ThinkingBudget(0, "</think>", "<think>")


def test_a_budget_of_a_completions_reasoning() -> None:
    """The detokenizer sees in the prompt's text whether reasoning is open there; else the answer may open it."""

    def of_text(**fields: object) -> ParsedRequest:
        body = body_of("text", {"thinking_token_budget": 7, **fields})
        return asked("text", body, server=ServerConfig(reasoning_parser="qwen3"))

    grammar = find_extra(of_text().mesh.extras, Grammar)
    assert grammar is not None
    assert grammar.kind is GrammarKind.FREE
    budget = grammar.thinking
    assert budget == ThinkingBudget(7, "</think>", "<think>", assumed=False, in_prompt=True)
    open_already, opened_later = ThinkingBudget(7, "</think>"), ThinkingBudget(7, "</think>", "<think>", assumed=False)
    assert budgets.seen(budget, "<think>a</think> b <think>\n") == open_already
    for prompt in ("", "a", "<think>a</think> b", "</think>"):
        assert budgets.seen(budget, prompt) == opened_later
    assert budgets.seen(open_already, "") is open_already
    assert not of_text(thinking_token_budget=-1).mesh.extras
    for fields in ({"use_beam_search": True}, {"guided_regex": "a+"}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(HttpError, match=r"^thinking_token_budget: "):
            of_text(**fields)


@pytest.mark.parametrize(
    ("parser", "fields"),
    [("openai_gptoss", {}), ("minimax_m2_append_think", {}), ("qwen3", {"use_beam_search": True}), ("", {})],
)
def test_budgets_that_cannot_be_kept(parser: str, fields: dict[str, object]) -> None:
    with pytest.raises(HttpError, match=r"^thinking_token_budget: "):
        budget_of(parser, **fields)
