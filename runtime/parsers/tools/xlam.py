"""`[{"name": ..., "arguments": {...}}, ...]` of xLAM, bare or as a block of code or between the tags of other formats."""

import re

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Call, ToolParser, Tools
from meshlm.runtime.parsers.whole_calls import WholeCalls, WholeForm

_AROUND = re.compile(r"(?:```(?:json)?(.*)```|<tool_call>(.*)</tool_call>|\[TOOL_CALLS\](.*))", re.DOTALL)


def read(text: str, tools: Tools) -> list[Call]:
    """The calls of a whole answer."""
    found = _AROUND.fullmatch(text)
    return json_calls.several(next(group for group in found.groups() if group is not None) if found else text, tools)


FORM = WholeForm(read, starts=("[", "```", "<tool_call>"))
PARSER = ToolParser(lambda tools: WholeCalls(FORM, tools), tags=("<tool_call>", "</tool_call>", "[TOOL_CALLS]"))
