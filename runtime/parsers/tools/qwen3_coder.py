"""`<tool_call><function=name><parameter=key>value</parameter> ... </function></tool_call>` of Qwen3-Coder.

The outer tags may be missing.
"""

from meshlm.runtime.parsers.parameter_calls import ParameterForm
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import ParameterStructure

CALL = ParameterForm(
    close="</function>", parameter="<parameter=", key_end=">", parameter_close="</parameter>", after="</tool_call>"
)
FORM = Form(CALL.body, opens=("<function=",), wrappers=("<tool_call>", "</tool_call>"))
# The tags around a call are text: models may leave them out.
STRUCTURE = ParameterStructure("<function=", "<function=NAME>", "</function>", "<parameter=KEY>\n", "\n</parameter>")
PARSER = parser(FORM, structure=STRUCTURE)
