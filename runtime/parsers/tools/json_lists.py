"""Calls as a JSON list, `[{"name": ..., "arguments": {...}}, ...]`, mostly behind or between tags."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import ToolParser
from meshlm.runtime.parsers.json_calls import Keys
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import FencedStructure, ListStructure

CALL_ID = r'("tool_call_id"\s?:\s?("[\w-]{0,64}"|[0-9]{1,9})\s{0,2},\s{0,3})?'  # a pattern
ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
# Cohere's Command: {"tool_call_id": ..., "tool_name": ..., "parameters": {...}}.
COMMAND = parser(
    Form(
        json_calls.calls(Keys(names=("tool_name", "name"), arguments=("parameters", "arguments"))),
        opens=(ACTION,),
        closes=(ACTION_END,),
    ),
    structure=ListStructure((ACTION,), ACTION_END, keys=("tool_name", "parameters"), before_name=CALL_ID),
)
# Jamba and Hunyuan; MiniMax-M1 writes one call a line there.
JAMBA = parser(
    Form(json_calls.calls(), opens=("<tool_calls>",), closes=("</tool_calls>",)),
    structure=ListStructure(("<tool_calls>",), "</tool_calls>"),
)
GIGACHAT = ("function call<|role_sep|>\n", "<|function_call|>")  # the role, or a tag; one call
GRANITE = ("<|tool_call|>", "<tool_call>")  # versions of Granite 3 differ in the tag
_PHI4_MINI = parser(Form(json_calls.calls(in_list=True), opens=("functools[",)))
PARSERS = {
    "cohere_command3": COMMAND,
    "cohere_command4": COMMAND,
    "gigachat3": parser(
        Form(json_calls.calls(), opens=GIGACHAT), "<|role_sep|>", structure=ListStructure(GIGACHAT, alone=True)
    ),
    "granite": parser(Form(json_calls.calls(), opens=GRANITE), structure=ListStructure(GRANITE)),
    "hunyuan_a13b": JAMBA,
    "jamba": JAMBA,
    "minimax": JAMBA,
    # Its tag is plain text.
    "phi4_mini_json": ToolParser(_PHI4_MINI.finder, ends_reasoning=True, structure=ListStructure(("functools",))),
    # Bare, or as a block of code, or between the tags of other formats.
    "xlam": parser(
        Form(
            json_calls.calls(Keys(known_only=True)),
            opens=("```json", "```", "<tool_call>", "[TOOL_CALLS]"),
            closes=("```", "</tool_call>"),
            starts=("[",),
        ),
        structure=FencedStructure(("[TOOL_CALLS]",), {"<tool_call>": "</tool_call>"}),
    ),
}
