"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` of older Mistral models, `[TOOL_CALLS]name[ARGS]{...}` of newer ones."""

import re

from meshlm.runtime.parsers import grammar_nodes as nodes
from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.scan import Steps
from meshlm.runtime.parsers.streamed_calls import Answer, Form, parser
from meshlm.runtime.parsers.structures import ListStructure

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME, _ID = re.compile(r"[^\s\[{]*"), re.compile(r"\w*")


def head(answer: Answer) -> Steps[tuple[str, str]]:
    """The call's name. Between it and the arguments a model may write an id; vLLM, too, gives the client one of its own."""
    name = yield from answer.run(_NAME)
    yield from answer.blanks()
    if (yield from answer.take(CALL_ID)):
        yield from answer.run(_ID)
    yield from answer.take(ARGS)
    return name, ""


_listed, _named = json_calls.calls(), json_calls.named(head)


def body(answer: Answer) -> Steps[None]:
    """The calls of either form."""
    yield from answer.blanks()
    is_json = yield from answer.ahead("[", "{")
    yield from (_listed if is_json else _named)(answer)


FORM = Form(body, opens=(OPEN,))
_ID_BEFORE = nodes.sequence(nodes.const(CALL_ID), nodes.regex(r"\w{1,64}"))
_BEFORE = (nodes.optional(_ID_BEFORE), nodes.const(ARGS))
PARSERS = {"mistral": parser(FORM, ARGS, CALL_ID, structure=ListStructure((OPEN,), also=_BEFORE), short_ids=True)}
