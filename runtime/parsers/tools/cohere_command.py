"""`<|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}]<|END_ACTION|>` of Cohere's Command models."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.json_calls import Keys
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import ListStructure

KEYS = Keys(names=("tool_name", "name"), arguments=("parameters", "arguments"))
OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
CALL_ID = r'("tool_call_id"\s?:\s?("[\w-]{0,64}"|[0-9]{1,9})\s{0,2},\s{0,3})?'  # a pattern
PARSER = parser(
    Form(json_calls.calls(KEYS), opens=(OPEN,), closes=(CLOSE,)),
    structure=ListStructure((OPEN,), CLOSE, keys=("tool_name", "parameters"), before_name=CALL_ID),
)
