"""The marks of gpt-oss' channels (harmony), and how its strict calls are held to their schemas. Pure; see `Structure` in calls.py."""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

Json = dict[str, Any]
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
FUNCTIONS = "functions."
_WORDS: Json = {"type": "regex", "pattern": "[ \\w]{0,32}"}


class ChannelStructure(Struct, frozen=True):
    """A call is a message to `functions.NAME`, in a channel that stands before or behind the name. It is the end of an answer."""

    def format(self, tools: Mapping[str, Mapping[str, Any] | None]) -> Json:
        """Messages, of which those to a function have arguments that fit."""
        contents = {name: self._behind_name(given) for name, given in tools.items()}
        heads = [f"{CHANNEL}{channel} to={FUNCTIONS}" for channel in ("commentary", "analysis")]
        heads.append(f"{START}assistant to={FUNCTIONS}")
        tags = [
            {"type": "tag", "begin": f"{head}{name}", "content": content, "end": ""}
            for head in heads
            for name, content in contents.items()
        ]
        messages = {"type": "triggered_tags", "triggers": heads, "tags": tags, "stop_after_first": True}
        beginnings = [
            {"pattern": rf"\s?to={re.escape(FUNCTIONS + name)}", "content": content}
            for name, content in contents.items()
        ]
        return {"type": "beginning_or", "beginnings": beginnings, "otherwise": messages}

    @staticmethod
    def _behind_name(given: Mapping[str, Any] | None) -> Json:
        marks = [
            {"type": "optional", "content": _sequence({"type": "const_string", "value": mark}, _WORDS)}
            for mark in (CHANNEL, CONSTRAIN)
        ]
        arguments = {"type": "json_schema", "json_schema": {"type": "object"} if given is None else given}
        blank = {"type": "regex", "pattern": "( [ \\w]{0,32})?"}  # a word that goes on is another name
        return _sequence(blank, *marks, {"type": "const_string", "value": MESSAGE}, arguments)


def _sequence(*elements: Json) -> Json:
    return {"type": "sequence", "elements": list(elements)}
