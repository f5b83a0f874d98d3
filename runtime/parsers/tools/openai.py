"""The calls of gpt-oss: messages to `functions.name` (runtime/parsers/harmony.py)."""

from meshlm.runtime.parsers.calls import ToolParser
from meshlm.runtime.parsers.harmony import TAGS, channel_calls
from meshlm.runtime.parsers.structures import ChannelStructure

PARSERS = {"openai": ToolParser(channel_calls, tags=TAGS, structure=ChannelStructure())}
