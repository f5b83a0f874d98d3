"""Which requests may be answered with tool calls, and which are refused."""

import json

import pytest
from parsing import asked, body_of

from meshlm.frontend.http.errors import HttpError
from meshlm.protocol.config import ServerConfig
from meshlm.runtime.parsers.tools.json_objects import CLOSE, OPEN

ASKS: dict[str, object] = {"tools": [{"type": "function", "function": {"name": "weather"}}]}
READS = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
NO_CALLS_OF_GPT_OSS = ServerConfig(reasoning_parser="openai_gptoss")
STRICT: dict[str, object] = {"tools": [{"type": "function", "function": {"name": "weather", "strict": True}}]}


@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({}, False),
        (ASKS, True),
        ({**ASKS, "tool_choice": "auto"}, True),
        ({**ASKS, "tool_choice": "none"}, False),
        ({"tools": []}, False),
        ({"tools": [], "tool_choice": "auto"}, False),
        ({"tools": [], "tool_choice": "none"}, False),
    ],
)
def test_which_answers_may_have_calls(fields: dict[str, object], reads: bool) -> None:
    assert asked("chat", body_of("chat", fields), server=READS).answer.tool_call_parser == ("hermes" if reads else "")
    found = asked("chat", body_of("chat", fields), server=READS)
    assert set(found.answer.tools) == ({"weather"} if reads else set())
    assert found.mesh.text.keep_special_tokens == ((OPEN, CLOSE) if reads else ())


@pytest.mark.parametrize(
    ("fields", "server", "param", "text"),
    [
        (ASKS, ServerConfig(), "tools", "--enable-auto-tool-choice"),
        (ASKS, ServerConfig(tool_call_parser="hermes"), "tools", "--enable-auto-tool-choice"),
        ({"tools": [{"type": "function"}]}, READS, "tools", r"tools\[0\]"),
        ({**ASKS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, READS, "tool_choice", "no tool 'f'"),
        ({**ASKS, "tool_choice": {"type": "function"}}, READS, "tool_choice", "is expected"),
        ({**ASKS, "tool_choice": {"type": "allowed_tools"}}, READS, "tool_choice", "a list of tools"),
        (
            {**ASKS, "tool_choice": "required", "structured_outputs": {"json": {}}},
            READS,
            "tool_choice",
            "no other constraint",
        ),
        ({**ASKS, "tool_choice": "required"}, NO_CALLS_OF_GPT_OSS, "tool_choice", "need --tool-call-parser"),
        ({**STRICT, "response_format": {"type": "json_object"}}, READS, "tools", "strict: goes with no other"),
        ({**ASKS, "tool_choice": "sometimes"}, READS, "tool_choice", "'none', 'auto', 'required' or a function"),
        ({"tool_choice": "required"}, READS, "tool_choice", "'required' needs tools"),
        ({**ASKS, "tool_choice": "required", "use_beam_search": True}, READS, "tool_choice", "use_beam_search"),
        ({**STRICT, "use_beam_search": True}, READS, "tools", "use_beam_search"),
        ({"tool_choice": "auto"}, READS, "tool_choice", "'auto' needs tools"),
        ({"tools": [], "tool_choice": "required"}, READS, "tool_choice", "'required' needs tools"),
    ],
)
def test_what_is_refused(fields: dict[str, object], server: ServerConfig, param: str, text: str) -> None:
    with pytest.raises(HttpError, match=text) as caught:
        asked("chat", body_of("chat", fields), server=server)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert json.loads(caught.value.body())["error"]["param"] == param
