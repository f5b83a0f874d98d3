"""`[name(key="value"), other()]`: calls as Python writes them, bare (Llama 3.2, ToolACE) or between tags."""

from meshlm.runtime.parsers.pythonic_calls import calls
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import PythonStructure

LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
LLAMA4 = ("<|python_start|>", "<|python_end|>")  # may be missing
OLMO3 = ("<function_calls>", "</function_calls>")  # each call on a line of its own
PARSERS = {
    "lfm2": parser(Form(calls, opens=LFM2[:1], closes=LFM2[1:]), structure=PythonStructure(*LFM2)),
    "llama4_pythonic": parser(
        Form(calls, opens=LLAMA4[:1], closes=LLAMA4[1:], starts=("[",)), structure=PythonStructure(*LLAMA4, bare=True)
    ),
    "olmo3": parser(Form(calls, opens=OLMO3[:1], closes=OLMO3[1:]), structure=PythonStructure(*OLMO3, lines=True)),
    "pythonic": parser(Form(calls, starts=("[",)), structure=PythonStructure(bare=True)),
}
