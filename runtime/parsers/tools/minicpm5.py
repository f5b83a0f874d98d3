"""`<function name="..."><param name="key">value</param></function>` of MiniCPM 5."""

from meshlm.runtime.parsers.parameter_calls import ParameterForm
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import ParameterStructure

CALL = ParameterForm(close="</function>", parameter="<param name=", key_end=">", parameter_close="</param>", cdata=True)
STRUCTURE = ParameterStructure(
    "<function name=", '<function name="NAME">', "</function>", '<param name="KEY">', "</param>"
)
PARSER = parser(Form(CALL.body, opens=("<function name=",)), structure=STRUCTURE)
