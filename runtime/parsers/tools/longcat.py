"""`<longcat_tool_call>{"name": ..., "arguments": {...}}</longcat_tool_call>`, as LongCat-Flash writes it."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import ToolParser
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

OPEN, CLOSE = "<longcat_tool_call>", "</longcat_tool_call>"
FORM = TaggedForm(json_calls.one, opens=(OPEN,), close=CLOSE)
PARSER = ToolParser(lambda tools: TaggedCalls(FORM, tools), tags=(OPEN, CLOSE), around=(OPEN, CLOSE))
