"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` of older Mistral models, `[TOOL_CALLS]name[ARGS]{...}` of newer ones."""

import re

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Call, ToolParser, Tools
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
# Between the name and the arguments a model may write the call's id; vLLM, too, gives the client one of its own.
_NAMED = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def read(body: str, tools: Tools) -> list[Call]:
    """The calls of either form."""
    if named := _NAMED.fullmatch(body):
        call = json_calls.call_of(named[1], named[2].strip())
        return [call] if call is not None else []
    return json_calls.several(body, tools)


FORM = TaggedForm(read, opens=(OPEN,), inner=(ARGS, CALL_ID))
PARSER = ToolParser(lambda tools: TaggedCalls(FORM, tools), tags=(OPEN, ARGS, CALL_ID), short_ids=True)
