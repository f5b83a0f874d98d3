"""`[{"name": ..., "arguments": {...}}, ...]` of xLAM, bare or as a block of code or between the tags of other formats."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.json_calls import Keys
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import FencedStructure

PARSER = parser(
    Form(
        json_calls.calls(Keys(known_only=True)),
        opens=("```json", "```", "<tool_call>", "[TOOL_CALLS]"),
        closes=("```", "</tool_call>"),
        starts=("[",),
    ),
    structure=FencedStructure(("[TOOL_CALLS]",), {"<tool_call>": "</tool_call>"}),
)
