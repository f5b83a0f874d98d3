"""`<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>` of Jamba; MiniMax-M1 writes one call a line there."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import ToolParser
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
FORM = TaggedForm(json_calls.several, opens=(OPEN,), close=CLOSE)
PARSER = ToolParser(lambda tools: TaggedCalls(FORM, tools), tags=(OPEN, CLOSE), around=(OPEN, CLOSE))
