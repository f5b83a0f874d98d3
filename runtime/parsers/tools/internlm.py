"""`<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>` of InternLM 2.5."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Call, ToolParser, Tools
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

OPEN, PLUGIN, CLOSE = "<|action_start|>", "<|plugin|>", "<|action_end|>"


def read(body: str, tools: Tools) -> list[Call]:
    """The call of a plug-in; InternLM's other actions, such as its interpreter's, are no calls of tools."""
    start = body.lstrip()
    return json_calls.one(start.removeprefix(PLUGIN), tools) if start.startswith(PLUGIN) else []


FORM = TaggedForm(read, opens=(OPEN,), close=CLOSE)
PARSER = ToolParser(lambda tools: TaggedCalls(FORM, tools), tags=(OPEN, PLUGIN, CLOSE), around=(OPEN, CLOSE))
