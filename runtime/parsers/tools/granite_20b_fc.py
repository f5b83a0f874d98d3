"""`<function_call> {"name": ..., "arguments": {...}}`, again and again, of Granite 20B."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.streamed_calls import Form, parser

PARSER = parser(Form(json_calls.calls(), opens=("<function_call>",)))
