"""Calls as JSON objects, `{"name": ..., "arguments": {...}}`, one behind another, mostly between tags."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Structure, ToolParser
from meshlm.runtime.parsers.json_calls import Keys
from meshlm.runtime.parsers.streamed_calls import Form, parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ACTION, PLUGIN, ACTION_END = "<|action_start|>", "<|plugin|>", "<|action_end|>"


def between(open_: str, close: str) -> ToolParser:
    """The parser of an object between lines with these tags, anywhere in an answer."""
    structure = Structure(open_, f'{open_}\n{{"name": "NAME", "arguments": ', f"}}\n{close}")
    return parser(Form(json_calls.calls(), opens=(open_,), closes=(close,)), structure=structure)


HERMES = between(OPEN, CLOSE)  # Hermes' and Qwen's templates
PARSERS = {
    "ernie45": HERMES,
    # Granite 20B has an opening tag only.
    "granite-20b-fc": parser(
        Form(json_calls.calls(), opens=("<function_call>",)),
        structure=Structure("<function_call>", '<function_call> {"name": "NAME", "arguments": ', "}"),
    ),
    "granite4": HERMES,
    "hermes": HERMES,
    # InternLM 2.5's other actions, such as its interpreter's, are no calls of tools.
    "internlm": parser(
        Form(json_calls.calls(before=PLUGIN), opens=(ACTION,), closes=(ACTION_END,)),
        PLUGIN,
        structure=Structure(
            f"{ACTION}{PLUGIN}", f'{ACTION}{PLUGIN}\n{{"name": "NAME", "parameters": ', f"}}{ACTION_END}"
        ),
    ),
    "longcat": between("<longcat_tool_call>", "</longcat_tool_call>"),
}
# Llama 3 writes one object, or several with `;` between, behind other text, too.
PARSERS["llama3_json"] = PARSERS["llama4_json"] = parser(
    Form(
        json_calls.calls(Keys(known_only=True)),
        opens=("<|python_tag|>",),
        begins=('{"name"', '{"type": "function"'),
        starts=("{",),
    ),
    structure=Structure('{"name": "', '{"name": "NAME", "parameters": ', "}"),
)
