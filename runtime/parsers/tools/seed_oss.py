"""The calls of Qwen3-Coder between tags of Seed-OSS' own."""

import msgspec

from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.tools.qwen3_coder import CALL as CALL_OF_QWEN
from meshlm.runtime.parsers.tools.qwen3_coder import STRUCTURE

CALL = msgspec.structs.replace(CALL_OF_QWEN, after="</seed:tool_call>")
PARSER = parser(
    Form(CALL.body, opens=("<function=",), wrappers=("<seed:tool_call>", "</seed:tool_call>")), structure=STRUCTURE
)
