"""The calls of pythonic.py between tags of LFM2's own."""

from meshlm.runtime.parsers import pythonic_calls
from meshlm.runtime.parsers.streamed_calls import Form, parser

PARSER = parser(Form(pythonic_calls.calls, opens=("<|tool_call_start|>",), closes=("<|tool_call_end|>",)))
