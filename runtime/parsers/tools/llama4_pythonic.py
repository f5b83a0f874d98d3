"""The calls of pythonic.py, which Llama 4 may write between tags."""

from meshlm.runtime.parsers import pythonic_calls
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import PythonStructure

BEGIN, END = "<|python_start|>", "<|python_end|>"
FORM = Form(pythonic_calls.calls, opens=(BEGIN,), closes=(END,), starts=("[",))
PARSER = parser(FORM, structure=PythonStructure(BEGIN, END, bare=True))
