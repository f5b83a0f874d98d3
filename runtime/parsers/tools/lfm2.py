"""The calls of pythonic.py between tags of LFM2's own."""

from meshlm.runtime.parsers import pythonic_calls
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import PythonStructure

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
FORM = Form(pythonic_calls.calls, opens=(OPEN,), closes=(CLOSE,))
PARSER = parser(FORM, structure=PythonStructure(OPEN, CLOSE))
