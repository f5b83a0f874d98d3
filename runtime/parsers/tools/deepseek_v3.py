"""DeepSeek V3 and R1: between tags of their own "function", the name, and the arguments as a block of JSON."""

import re

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Call, ToolParser, Tools
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEPARATOR, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
TAGS = (BEGIN, END, OPEN, SEPARATOR, CLOSE)
_BODY = re.compile(r"\s*(?:function)?\s*<｜tool▁sep｜>([^\n]+)\n```json\n(.*)\n```\s*", re.DOTALL)


def read(body: str, tools: Tools) -> list[Call]:
    """The call of one body."""
    found = _BODY.fullmatch(body)
    call = json_calls.call_of(found[1].strip(), found[2]) if found else None
    return [call] if call is not None else []


FORM = TaggedForm(read, opens=(OPEN,), close=CLOSE, wrappers=(BEGIN, END))
PARSER = ToolParser(lambda tools: TaggedCalls(FORM, tools), tags=TAGS, around=(BEGIN, END))
