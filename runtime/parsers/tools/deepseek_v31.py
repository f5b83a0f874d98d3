"""DeepSeek V3.1: between the tags of V3 the name and the arguments."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Call, ToolParser, Tools
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm
from meshlm.runtime.parsers.tools.deepseek_v3 import BEGIN, CLOSE, END, OPEN, SEPARATOR, TAGS


def read(body: str, tools: Tools) -> list[Call]:
    """The call of one body."""
    name, separator, arguments = body.partition(SEPARATOR)
    call = json_calls.call_of(name.strip(), arguments.strip()) if separator else None
    return [call] if call is not None else []


FORM = TaggedForm(read, opens=(OPEN,), close=CLOSE, wrappers=(BEGIN, END))
PARSER = ToolParser(lambda tools: TaggedCalls(FORM, tools), tags=TAGS, around=(BEGIN, END))
