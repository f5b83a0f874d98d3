"""`functools[{"name": ..., "arguments": {...}}, ...]` of Phi-4-mini."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import ToolParser
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

FORM = TaggedForm(json_calls.several, opens=("functools[",), prefix="[")
PARSER = ToolParser(lambda tools: TaggedCalls(FORM, tools), tags=())
