"""Reads a pickle of plain values without running it: other engines' trainers send NCCL's id and CUDA's memory handles so.

Pickles are programs. Of this one only the instructions that make numbers, text, bytes and containers are followed; what it names and
would call is told as names (`Named`, `Called`), for the reader to know or refuse.
"""

import pickletools
from typing import Any, NamedTuple

MAX_VALUES = 4_000_000  # instructions
_MARK = object()
_VALUES = frozenset(
    (
        *(
            "BININT",
            "BININT1",
            "BININT2",
            "LONG1",
            "LONG4",
            "BINFLOAT",
            "SHORT_BINUNICODE",
            "BINUNICODE",
            "BINUNICODE8",
        ),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    )
)
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class NotPlain(Exception):
    """The bytes are no pickle of plain values; the message says what is in them."""


class Named(NamedTuple):
    """A class or function that the pickle names."""

    module: str
    name: str


class Called(NamedTuple):
    """What the pickle would have had called."""

    function: Named
    arguments: tuple[Any, ...]


def read(pickle: bytes) -> Any:
    """The value that it stands for. NotPlain."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
            if count >= MAX_VALUES:
                raise NotPlain("the pickle is too long")
            _follow(opcode.name, argument, stack, memo)
        (found,) = stack
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise NotPlain(f"it is no pickle of plain values ({error})") from None
    return found


def _follow(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in _VALUES:
        stack.append(argument)
        return
    if name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
        return
    match name:
        case "PROTO" | "FRAME" | "STOP":
            pass
        case "EMPTY_LIST" | "EMPTY_DICT":
            stack.append([] if name == "EMPTY_LIST" else {})
        case "MARK":
            stack.append(_MARK)
        case "TUPLE" | "APPENDS" | "SETITEMS":
            at = max(place for place, one in enumerate(stack) if one is _MARK)
            values = stack[at + 1 :]
            del stack[at:]
            _gather(name, values, stack)
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
        case "APPEND":
            value = stack.pop()
            _gather("APPENDS", [value], stack)
        case "SETITEM":
            value, key = stack.pop(), stack.pop()
            _gather("SETITEMS", [key, value], stack)
        case "BINPUT" | "LONG_BINPUT":
            memo[argument] = stack[-1]
        case "MEMOIZE":
            memo[len(memo)] = stack[-1]
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "GLOBAL" | "STACK_GLOBAL":
            _name(argument, stack)
        case "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            if not isinstance(function, Named) or not isinstance(arguments, tuple):
                raise NotPlain("it is no pickle of plain values")
            stack.append(Called(function, arguments))
        case _:
            raise NotPlain(f"the pickle has the instruction {name}")


def _gather(name: str, values: list[Any], stack: list[Any]) -> None:
    if name == "TUPLE":
        stack.append(tuple(values))
    elif name == "APPENDS":
        if not isinstance(stack[-1], list):
            raise NotPlain("it is no pickle of plain values")
        stack[-1].extend(values)
    else:
        if not isinstance(stack[-1], dict):
            raise NotPlain("it is no pickle of plain values")
        stack[-1].update(zip(values[::2], values[1::2], strict=True))


def _name(argument: Any, stack: list[Any]) -> None:
    if argument is not None:  # GLOBAL: both in one text
        module, _, name = argument.partition(" ")
    else:
        name, module = stack.pop(), stack.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        raise NotPlain("it is no pickle of plain values")
    stack.append(Named(module, name))
