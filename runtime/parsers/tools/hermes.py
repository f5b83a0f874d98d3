"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes' and Qwen's templates ask for, anywhere in an answer."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import ToolParser
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = TaggedForm(json_calls.one, opens=(OPEN,), close=CLOSE)
PARSER = ToolParser(lambda tools: TaggedCalls(FORM, tools), tags=(OPEN, CLOSE), around=(OPEN, CLOSE))
