"""`<start_function_call>call:name{key:<escape>text<escape>,other:1}<end_function_call>` of FunctionGemma."""

import re

import msgspec

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Call, ToolParser, Tools
from meshlm.runtime.parsers.quoting import BetweenTags
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

AROUND, ESCAPE = ("<start_function_call>", "<end_function_call>"), "<escape>"
_BODY = re.compile(r"\s*call:([\w.-]+)(\{.*\})\s*", re.DOTALL)
_KEY = re.compile(r"([{,]\s*)([\w.-]+)\s*:")


def read(body: str, tools: Tools) -> list[Call]:
    """The call of one body. Texts stand between escapes, and keys without quotes; else it is JSON."""
    found = _BODY.fullmatch(body)
    if found is None:
        return []
    parts = found[2].split(ESCAPE)
    parts[::2] = [_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = [msgspec.json.encode(part).decode() for part in parts[1::2]]
    call = json_calls.call_of(found[1], "".join(parts))
    return [call] if call is not None and len(parts) % 2 else []


FORM = TaggedForm(
    read,
    opens=(AROUND[0],),
    close=AROUND[1],
    quoting=lambda: BetweenTags(ESCAPE, ESCAPE),
)
PARSER = ToolParser(lambda tools: TaggedCalls(FORM, tools), tags=(*AROUND, ESCAPE), around=AROUND)
