"""DeepSeek V4: the calls of V3.2 between other tags."""

from meshlm.runtime.parsers.streamed_calls import parser
from meshlm.runtime.parsers.tools.deepseek_v32 import STRUCTURE, form

PARSER = parser(form("tool_calls"), "｜DSML｜", structure=STRUCTURE)
