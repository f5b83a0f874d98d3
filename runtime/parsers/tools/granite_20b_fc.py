"""`<function_call> {"name": ..., "arguments": {...}}`, again and again, of Granite 20B."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import ToolParser
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

OPEN = "<function_call>"
FORM = TaggedForm(json_calls.one, opens=(OPEN,))
PARSER = ToolParser(lambda tools: TaggedCalls(FORM, tools), tags=(OPEN,))
