"""`<|function_call|>{"name": ..., "arguments": {...}}` of GigaChat 3, or behind the role "function call"."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import ListStructure

OPENS = ("function call<|role_sep|>\n", "<|function_call|>")
PARSER = parser(Form(json_calls.calls(), opens=OPENS), "<|role_sep|>", structure=ListStructure(OPENS, alone=True))
