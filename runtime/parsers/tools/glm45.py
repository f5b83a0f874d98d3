"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value> ... </tool_call>` of GLM 4.5 to 4.7 and of Laguna (poolside)."""

from meshlm.runtime.parsers.parameter_calls import ParameterForm
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import ParameterStructure

CALL = ParameterForm(
    name_end="",
    parameter="<arg_key>",
    key_end="</arg_key>",
    value_open="<arg_value>",
    parameter_close="</arg_value>",
    close="</tool_call>",
    trims=False,
    known_if_empty=True,
)
FORM = Form(CALL.body, opens=("<tool_call>",))
STRUCTURE = ParameterStructure(
    "<tool_call>", "<tool_call>NAME", "</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>"
)
PARSER = parser(FORM, "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", structure=STRUCTURE)
