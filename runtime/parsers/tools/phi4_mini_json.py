"""`functools[{"name": ..., "arguments": {...}}, ...]` of Phi-4-mini."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import ToolParser
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import ListStructure

_FORM = parser(Form(json_calls.calls(in_list=True), opens=("functools[",)))
PARSER = ToolParser(_FORM.finder, ends_reasoning=True, structure=ListStructure(("functools",)))  # its tag is plain text
