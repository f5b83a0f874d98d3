"""`<|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}]<|END_ACTION|>` of Cohere's Command models."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.json_calls import Keys
from meshlm.runtime.parsers.streamed_calls import Form, parser

KEYS = Keys(names=("tool_name", "name"), arguments=("parameters", "arguments"))
PARSER = parser(Form(json_calls.calls(KEYS), opens=("<|START_ACTION|>",), closes=("<|END_ACTION|>",)))
