"""`<longcat_tool_call>{"name": ..., "arguments": {...}}</longcat_tool_call>`, as LongCat-Flash writes it."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.streamed_calls import Form, parser

PARSER = parser(Form(json_calls.calls(), opens=("<longcat_tool_call>",), closes=("</longcat_tool_call>",)))
