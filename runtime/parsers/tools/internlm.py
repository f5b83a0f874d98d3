"""`<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>` of InternLM 2.5.

Its other actions, such as its interpreter's, are no calls of tools.
"""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Structure
from meshlm.runtime.parsers.streamed_calls import Form, parser

OPEN, PLUGIN, CLOSE = "<|action_start|>", "<|plugin|>", "<|action_end|>"
PARSER = parser(
    Form(json_calls.calls(before=PLUGIN), opens=(OPEN,), closes=(CLOSE,)),
    PLUGIN,
    structure=Structure(f"{OPEN}{PLUGIN}", f'{OPEN}{PLUGIN}\n{{"name": "NAME", "parameters": ', f"}}{CLOSE}"),
)
