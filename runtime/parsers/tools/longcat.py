"""`<longcat_tool_call>{"name": ..., "arguments": {...}}</longcat_tool_call>`, as LongCat-Flash writes it."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Structure
from meshlm.runtime.parsers.streamed_calls import Form, parser

OPEN, CLOSE = "<longcat_tool_call>", "</longcat_tool_call>"
PARSER = parser(
    Form(json_calls.calls(), opens=(OPEN,), closes=(CLOSE,)),
    structure=Structure(OPEN, f'{OPEN}\n{{"name": "NAME", "arguments": ', f"}}\n{CLOSE}"),
)
