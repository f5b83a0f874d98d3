"""`{"name": ..., "parameters": {...}}`, or several with `;` between, as Llama 3's templates ask for."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Structure
from meshlm.runtime.parsers.json_calls import Keys
from meshlm.runtime.parsers.streamed_calls import Form, parser

PYTHON_TAG = "<|python_tag|>"
BEGINS = ('{"name"', '{"type": "function"')  # behind other text, too
PARSER = parser(
    Form(json_calls.calls(Keys(known_only=True)), opens=(PYTHON_TAG,), begins=BEGINS, starts=("{",)),
    structure=Structure('{"name": "', '{"name": "NAME", "parameters": ', "}"),
)
