"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value> ... </tool_call>` of GLM 4.5 to 4.7."""

import re

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Call, ToolParser, Tools
from meshlm.runtime.parsers.quoting import BetweenTags
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

AROUND = ("<tool_call>", "</tool_call>")
_BODY = re.compile(r"\s*([^<>{}\s]+)\s*(<arg_key>.*)?", re.DOTALL)
_ARGUMENT = re.compile(
    r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))\s*", re.DOTALL
)


def read(body: str, tools: Tools) -> list[Call]:
    """The call of one body: a name, and values with the types of the tool's schema."""
    found = _BODY.fullmatch(body)
    written = json_calls.fields(_ARGUMENT, found[2] or "") if found else None
    if found is None or written is None or (found[2] is None and found[1] not in tools):
        return []
    return [Call(found[1], json_calls.typed_arguments(written, tools.get(found[1], {})))]


FORM = TaggedForm(
    read,
    opens=(AROUND[0],),
    close=AROUND[1],
    quoting=lambda: BetweenTags("<arg_value>", "</arg_value>"),
    needs_close=True,
)
PARSER = ToolParser(
    lambda tools: TaggedCalls(FORM, tools),
    tags=(*AROUND, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    around=AROUND,
)
