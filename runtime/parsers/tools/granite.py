"""`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]` of Granite 3, whose versions differ in the tag."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import ToolParser
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

OPENS = ("<|tool_call|>", "<tool_call>")
FORM = TaggedForm(json_calls.several, opens=OPENS)
PARSER = ToolParser(lambda tools: TaggedCalls(FORM, tools), tags=OPENS)
