"""Kimi K2: between tags of its own an id that holds the name, `functions.name:0`, and the arguments."""

import re

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Call, ToolParser, Tools
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OPEN, SEPARATOR, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(.+):\d+")


def read(body: str, tools: Tools) -> list[Call]:
    """The call of one body, with the model's id: its template shows it again beside the tool's answer."""
    written, separator, arguments = body.partition(SEPARATOR)
    found = _ID.fullmatch(written.strip())
    call = json_calls.call_of(found[1], arguments.strip(), found[0]) if found and separator else None
    return [call] if call is not None else []


FORM = TaggedForm(read, opens=(OPEN,), close=CLOSE, wrappers=(BEGIN, END))
PARSER = ToolParser(
    lambda tools: TaggedCalls(FORM, tools), tags=(BEGIN, END, OPEN, SEPARATOR, CLOSE), around=(BEGIN, END)
)
