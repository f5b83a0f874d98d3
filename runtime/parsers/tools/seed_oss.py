"""The calls of Qwen3-Coder between tags of Seed-OSS' own."""

from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.tools.qwen3_coder import CALL

PARSER = parser(Form(CALL.body, opens=("<function=",), wrappers=("<seed:tool_call>", "</seed:tool_call>")))
