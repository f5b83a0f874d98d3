"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes' and Qwen's templates ask for, anywhere in an answer."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Structure
from meshlm.runtime.parsers.streamed_calls import Form, parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PARSER = parser(
    Form(json_calls.calls(), opens=(OPEN,), closes=(CLOSE,)),
    structure=Structure(OPEN, f'{OPEN}\n{{"name": "NAME", "arguments": ', f"}}\n{CLOSE}"),
)
