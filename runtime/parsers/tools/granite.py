"""`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]` of Granite 3, whose versions differ in the tag."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import ListStructure

OPENS = ("<|tool_call|>", "<tool_call>")
PARSER = parser(Form(json_calls.calls(), opens=OPENS), structure=ListStructure(OPENS))
