"""`<|tools_prefix|>[{"name": {...arguments}}, ...]<|tools_suffix|>` of Apertus: each call is an object of one pair."""

import re

from meshlm.runtime.parsers.scan import Steps
from meshlm.runtime.parsers.streamed_calls import Answer, Form, parser
from meshlm.runtime.parsers.structures import ListStructure

OPEN, CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"
_BETWEEN = re.compile(r"[\s\[,]*")


def body(answer: Answer) -> Steps[None]:
    """A list of calls."""
    while True:
        answer.hold()
        yield from answer.run(_BETWEEN)
        if not (yield from call(answer)):
            answer.back()
            break
        answer.drop()
    yield from answer.take_behind_blanks("]")


def call(answer: Answer) -> Steps[bool]:
    """One call; its name is the key of its arguments."""
    if not (yield from answer.take("{")):
        return False
    yield from answer.blanks()
    name = yield from answer.json_string()
    yield from answer.blanks()
    if not name or not (yield from answer.take(":")):
        return False
    yield from answer.blanks()
    if not (yield from answer.ahead("{")):
        return False
    answer.begin(name)
    yield from answer.json.value(answer, answer.add)
    answer.end()
    yield from answer.blanks()
    yield from answer.take("}")
    return True


PARSERS = {
    "apertus": parser(Form(body, opens=(OPEN,), closes=(CLOSE,)), structure=ListStructure((OPEN,), CLOSE, by_name=True))
}
