"""The marks of gpt-oss' channels (harmony), and how its strict calls are held to their schemas. Pure; see `Structure` in calls.py."""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from meshlm.runtime.parsers import grammar_nodes as nodes
from meshlm.runtime.parsers.grammar_nodes import Json

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
FUNCTIONS = "functions."
_WORDS: Json = nodes.regex("[ \\w]{0,32}")


class ChannelStructure(Struct, frozen=True):
    """A call is a message to `functions.NAME`, in a channel that stands before or behind the name. It is the end of an answer."""

    def format(self, tools: Mapping[str, Mapping[str, Any] | None]) -> Json:
        """Messages, of which those to a function have arguments that fit."""
        contents = {name: self._behind_name(given) for name, given in tools.items()}
        heads = [f"{CHANNEL}{channel} to={FUNCTIONS}" for channel in ("commentary", "analysis")]
        heads.append(f"{START}assistant to={FUNCTIONS}")
        tags = [nodes.tag(f"{head}{name}", content) for head in heads for name, content in contents.items()]
        messages = nodes.triggered(heads, tags, stop_after_first=True)
        beginnings = [
            {"pattern": rf"\s?to={re.escape(FUNCTIONS + name)}", "content": content}
            for name, content in contents.items()
        ]
        return {"type": "beginning_or", "beginnings": beginnings, "otherwise": messages}

    @staticmethod
    def _behind_name(given: Mapping[str, Any] | None) -> Json:
        marks = [nodes.optional(nodes.sequence(nodes.const(mark), _WORDS)) for mark in (CHANNEL, CONSTRAIN)]
        arguments = nodes.arguments(given)
        blank = nodes.regex("( [ \\w]{0,32})?")  # a word that goes on is another name
        return nodes.sequence(blank, *marks, nodes.const(MESSAGE), arguments)
