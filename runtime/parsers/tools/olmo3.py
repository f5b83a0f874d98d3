"""Calls as Python writes them, each on a line of its own, between tags of OLMo 3's own."""

from meshlm.runtime.parsers import pythonic_calls
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import PythonStructure

OPEN, CLOSE = "<function_calls>", "</function_calls>"
FORM = Form(pythonic_calls.calls, opens=(OPEN,), closes=(CLOSE,))
PARSER = parser(FORM, structure=PythonStructure(OPEN, CLOSE, lines=True))
