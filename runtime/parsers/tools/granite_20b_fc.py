"""`<function_call> {"name": ..., "arguments": {...}}`, again and again, of Granite 20B."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Structure
from meshlm.runtime.parsers.streamed_calls import Form, parser

OPEN = "<function_call>"
PARSER = parser(
    Form(json_calls.calls(), opens=(OPEN,)), structure=Structure(OPEN, f'{OPEN} {{"name": "NAME", "arguments": ', "}")
)
