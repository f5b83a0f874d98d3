"""`[name(key="value"), other()]`: calls as a Python list, as Llama 3.2 and ToolACE write them."""

from meshlm.runtime.parsers import pythonic_calls
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import PythonStructure

PARSER = parser(Form(pythonic_calls.calls, starts=("[",)), structure=PythonStructure(bare=True))
