"""`call:name{key:"text",other:1}` with bare keys and with a tag as the mark around texts: Gemma's calls. Pure."""

import re

import msgspec

from meshlm.runtime.parsers.scan import Steps, Tags
from meshlm.runtime.parsers.streamed_calls import Answer, Body
from meshlm.runtime.parsers.typed_values import escaped, quoted

_NAME = re.compile(r"[\w.-]*")
_LITERALS = ("true", "false", "null")


def gemma_calls(escape: str, close: str) -> Body:
    """A body of one call. `escape` stands before and behind a text."""
    around, ends = Tags(escape), Tags(escape, close, *'{}[],:"')

    def body(answer: Answer) -> Steps[None]:
        yield from answer.blanks()
        if not (yield from answer.take("call:")):
            return
        name = yield from answer.run(_NAME)
        if not name or not (yield from answer.ahead("{")):
            return
        answer.begin(name)
        yield from value(answer)

    def value(answer: Answer) -> Steps[None]:
        """The object, as JSON; it ends early where the call does."""
        depth = 0
        while True:
            yield from answer.blanks()
            sign = yield from answer.take(escape, *"{}[],:")
            if sign == escape:
                answer.add('"')
                ended = yield from answer.stream(around, lambda text: answer.add(escaped(text)))
                if not ended:
                    return
                answer.add('"')
            elif sign:
                answer.add(sign)
                depth += (sign in "{[") - (sign in "}]")
                if not depth:
                    return
            elif not (yield from word(answer)):
                return

    def word(answer: Answer) -> Steps[bool]:
        """A key, a number, a name of JSON's, or a text without its marks; False where none of them follows."""
        string = yield from answer.json_string()
        if string is not None:
            answer.add(quoted(string))
            return True
        answer.hold()
        text, tag = yield from answer.upto(ends)
        if not text or not tag:
            answer.back()
            return False
        answer.drop()
        answer.at -= len(tag)
        bare = text.strip()
        answer.add(bare if tag != ":" and (bare in _LITERALS or _is_number(bare)) else quoted(bare))
        return True

    return body


def _is_number(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), int | float)
    except msgspec.DecodeError:
        return False
