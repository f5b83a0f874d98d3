"""`[name(key="value"), other()]`: calls as a Python list, as Llama 3.2 and ToolACE write them."""

from meshlm.runtime.parsers import pythonic_calls
from meshlm.runtime.parsers.list_structures import PythonStructure
from meshlm.runtime.parsers.streamed_calls import Form, parser

PARSER = parser(Form(pythonic_calls.calls, starts=("[",)), structure=PythonStructure(bare=True))
