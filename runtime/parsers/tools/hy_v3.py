"""`<tool_call>name<tool_sep><arg_key>key</arg_key><arg_value>value</arg_value></tool_call>` of Hunyuan 3, between `<tool_calls>`."""

from meshlm.runtime.parsers.parameter_calls import ParameterForm
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import ParameterStructure

CALL = ParameterForm(
    name_end="<tool_sep>",
    parameter="<arg_key>",
    key_end="</arg_key>",
    value_open="<arg_value>",
    parameter_close="</arg_value>",
    close="</tool_call>",
    trims=False,
)
FORM = Form(CALL.body, opens=("<tool_call>",), wrappers=("<tool_calls>", "</tool_calls>"))
STRUCTURE = ParameterStructure(
    "<tool_call>", "<tool_call>NAME<tool_sep>", "</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>"
)
PARSER = parser(
    FORM, "</tool_call>", "<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", structure=STRUCTURE
)
