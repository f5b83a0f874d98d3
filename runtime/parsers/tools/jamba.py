"""`<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>` of Jamba and Hunyuan; MiniMax-M1 writes one call a line there."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import ListStructure

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
PARSER = parser(Form(json_calls.calls(), opens=(OPEN,), closes=(CLOSE,)), structure=ListStructure((OPEN,), CLOSE))
