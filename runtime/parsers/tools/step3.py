"""`<steptml:invoke name="..."><steptml:parameter name="key">value</steptml:parameter></steptml:invoke>` of Step 3, between tags."""

from meshlm.runtime.parsers.parameter_calls import ParameterForm
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import ParameterStructure

BEGIN, END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
OPEN, SEPARATOR, CLOSE = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"
CALL = ParameterForm(
    close="</steptml:invoke>", parameter="<steptml:parameter name=", key_end=">", parameter_close="</steptml:parameter>"
)
FORM = Form(CALL.body, opens=("<steptml:invoke name=",), wrappers=(BEGIN, END, f"{OPEN}function{SEPARATOR}", CLOSE))
STRUCTURE = ParameterStructure(
    "<steptml:invoke name=",
    '<steptml:invoke name="NAME">',
    "</steptml:invoke>",
    '<steptml:parameter name="KEY">',
    "</steptml:parameter>",
)
PARSER = parser(FORM, OPEN, SEPARATOR, structure=STRUCTURE)
