"""`<minimax:tool_call><invoke name="..."><parameter name="key">value</parameter> ... </invoke></minimax:tool_call>` of MiniMax-M2."""

from meshlm.runtime.parsers.parameter_calls import ParameterForm
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import ParameterStructure

CALL = ParameterForm(close="</invoke>", parameter="<parameter name=", key_end=">", parameter_close="</parameter>")
FORM = Form(CALL.body, opens=("<invoke name=",), wrappers=("<minimax:tool_call>", "</minimax:tool_call>"))
STRUCTURE = ParameterStructure(
    "<invoke name=", '<invoke name="NAME">', "</invoke>", '<parameter name="KEY">', "</parameter>"
)
PARSER = parser(FORM, structure=STRUCTURE)
