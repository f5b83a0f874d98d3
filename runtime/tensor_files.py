"""Reads what was saved with `torch.save`, a tensor or tensors by name, without torch and without running anything that the file says.

Such a file is a zip archive with a pickle, which says types, shapes and places, and the numbers. Pickles are programs: of this one only
the few instructions are followed that torch.save writes for plain tensors, with the few names that belong to them; all else is
refused. Called by frontends, which check the vectors of a prompt before the mesh gets them (protocol/prompt_embeds.py), and by those
who read adapters (model_files/adapter_tensors.py).
"""

import base64
import binascii
import io
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from meshlm.protocol.edges.text import MediaPrompt, TokenPrompt
from meshlm.protocol.prompt_embeds import ITEM_BYTES, MAX_EMBEDS_BYTES, EmbedsDType, PromptEmbeds
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError

MAX_PICKLE_BYTES = 1 << 14  # of one tensor
MAX_DICT_BYTES = 1 << 22  # of many
STORAGES: dict[str, EmbedsDType] = {
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
}
EXPONENT_BITS: dict[EmbedsDType, int] = {"float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80}
TENSOR, PARAMETER, HOOKS = (
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "collections OrderedDict",
)


class _Storage(NamedTuple):
    dtype: EmbedsDType
    key: str
    num_items: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Name(str):
    """A class or function that the pickle names."""

    __slots__ = ()


_MARK = object()


class NotATensor(ValueError):
    """The text says why."""


def embeds_of(given: str, hidden_size: int, vocab_size: int, param: str) -> PromptEmbeds:
    """The vectors of a prompt that came as base64 of a saved tensor [tokens, hidden]. RequestError names the field at fault."""
    try:
        tensor, raw = load(base64.b64decode(given, validate=True))
        size = tensor.size[1:] if len(tensor.size) == 3 and tensor.size[0] == 1 else tensor.size
        return embeds_of_rows(raw, tensor.storage.dtype, size, hidden_size, vocab_size)
    except (NotATensor, binascii.Error, ValueError) as error:
        text = f"{param}: must be base64 of a tensor that torch.save wrote: {error}"
        raise RequestError(ErrorKind.INVALID, text, param) from None


def embeds_of_rows(
    raw: bytes, dtype: EmbedsDType, size: tuple[int, ...], hidden_size: int, vocab_size: int
) -> PromptEmbeds:
    """The vectors [tokens, hidden], with the ids that stand for them. NotATensor says what is wrong with them."""
    if len(size) != 2:
        raise NotATensor(f"its shape is {list(size)}, and should be [tokens, {hidden_size}]")
    count, width = size
    if width != hidden_size:
        raise NotATensor(f"its vectors have {width} numbers, and the model's have {hidden_size}")
    if not count:
        raise NotATensor("it holds no vector")
    if len(raw) > MAX_EMBEDS_BYTES:
        raise NotATensor(f"it has {len(raw)} bytes; at most {MAX_EMBEDS_BYTES} are taken for one prompt")
    if len(raw) != count * width * ITEM_BYTES[dtype]:
        raise NotATensor("its numbers are not as many as its shape says")
    _check_finite(raw, dtype, width)
    return PromptEmbeds(dtype, ((0, count),), raw, token_ids(raw, count, vocab_size)).with_digests()


def prompt_of(embeds: PromptEmbeds) -> MediaPrompt:
    """A prompt that is nothing but these vectors."""
    return MediaPrompt(TokenPrompt(embeds.token_ids), (embeds,))


def _check_finite(raw: bytes, dtype: EmbedsDType, width: int) -> None:
    """NotATensor where a number is infinite or none at all: every bit of its exponent is set."""
    import numpy as np  # a frontend without such prompts does without

    exponent = EXPONENT_BITS[dtype]
    bits = np.frombuffer(raw, f"<u{ITEM_BYTES[dtype]}")
    if len(found := np.flatnonzero((bits & exponent) == exponent)):
        row, column = divmod(int(found[0]), width)
        raise NotATensor(f"number {column} of its vector {row} is not finite")


def token_ids(raw: bytes, count: int, vocab_size: int) -> bytes:
    """An id of the vocabulary for each vector, which says nothing but that equal ones are equal."""
    size, view = len(raw) // count, memoryview(raw)
    return pack_i32([zlib.crc32(view[at : at + size]) % vocab_size for at in range(0, len(raw), size)])


def kept(embeds: PromptEmbeds, keep: int, side: str) -> PromptEmbeds:
    """The first `keep` of the vectors of a prompt that has nothing else (side: right is cut), or the last ones; 0: all."""
    count = len(embeds.token_ids) // 4
    if not keep or keep >= count:
        return embeds
    first = 0 if side == "right" else count - keep
    return embeds.cut(first, first + keep) or embeds


def load(data: bytes) -> tuple[_Tensor, bytes]:
    """The tensor that the file holds, and its numbers, little-endian and in order. NotATensor."""
    with _archive(data) as (archive, names):
        tensor = _unpickled(_read(archive, names.get("data.pkl"), MAX_PICKLE_BYTES))
        if not isinstance(tensor, _Tensor):
            raise NotATensor("it is no plain tensor")
        return tensor, _numbers(archive, names, tensor, len(data))


def load_dict(data: bytes) -> dict[str, tuple[EmbedsDType, tuple[int, ...], bytes]]:
    """The tensors that the file holds by name: type, shape, and the numbers, little-endian and in order. NotATensor."""
    with _archive(data) as (archive, names):
        found = _unpickled(_read(archive, names.get("data.pkl"), MAX_DICT_BYTES))
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise NotATensor("it holds no tensors by name")
        tensors, left = {}, 2 * len(data)  # names may share numbers; but not to no end
        for name, tensor in found.items():
            if not isinstance(tensor, _Tensor):
                raise NotATensor(f"{name[:80]} is no plain tensor")
            raw = _numbers(archive, names, tensor, len(data))
            if (left := left - len(raw)) < 0:
                raise NotATensor("its tensors have more numbers than the file")
            tensors[name] = tensor.storage.dtype, tensor.size, raw
        return tensors


@contextmanager
def _archive(data: bytes) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """The file, opened, and what is in it by name. NotATensor."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if "byteorder" in names and _read(archive, names["byteorder"], 16) != b"little":
                raise NotATensor("it was written by a machine with another order of bytes")
            yield archive, names
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, OSError, struct.error) as error:
        raise NotATensor(f"it is no file of torch.save's newer form, a zip archive ({error})") from None


def _numbers(archive: zipfile.ZipFile, names: dict[str, zipfile.ZipInfo], tensor: _Tensor, most: int) -> bytes:
    raw = _read(archive, names.get(f"data/{tensor.storage.key}"), most)
    item = ITEM_BYTES[tensor.storage.dtype]
    count = 1
    for size in tensor.size:
        count *= size
    begin = tensor.offset * item
    if len(raw) != tensor.storage.num_items * item or begin + count * item > len(raw):
        raise NotATensor("its numbers are not as many as it says")
    if not _is_contiguous(tensor):
        raise NotATensor("it is not contiguous; save tensor.contiguous()")
    return raw[begin : begin + count * item]


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo | None, most: int) -> bytes:
    if info is None:
        raise NotATensor("it holds no tensor")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:  # torch.save does not compress
        raise NotATensor(f"{info.filename} is compressed or too long")
    return archive.read(info)


def _is_contiguous(tensor: _Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.size), reversed(tensor.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# --- the pickle ---


def _unpickled(pickle: bytes) -> Any:
    """What the pickle stands for. It is followed instruction by instruction, and none but these has a meaning here."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(pickle):
            _follow(opcode.name, argument, stack, memo)
        (found,) = stack
    except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise NotATensor(f"it is no plain tensor ({error})") from None
    return found


def _follow(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    match name:
        case "PROTO" | "FRAME" | "STOP":
            pass
        case "GLOBAL":
            stack.append(_known(argument))
        case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
            stack.append(argument)
        case "NEWTRUE" | "NEWFALSE":
            stack.append(name == "NEWTRUE")
        case "MARK":
            stack.append(_MARK)
        case "EMPTY_TUPLE":
            stack.append(())
        case "EMPTY_DICT":
            stack.append({})
        case "SETITEM":
            value, key = stack.pop(), stack.pop()
            _into(stack[-1], [key, value])
        case "SETITEMS":
            items = _since_mark(stack)
            _into(stack[-1], items)
        case "BUILD":  # the attributes of a dictionary of weights: versions of modules
            _into(stack[-2], [])
            stack.pop()
        case "TUPLE":
            items = _since_mark(stack)
            stack.append(tuple(items))
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
        case "BINPUT" | "LONG_BINPUT":
            memo[argument] = stack[-1]
        case "MEMOIZE":
            memo[len(memo)] = stack[-1]
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "BINPERSID":
            stack.append(_storage(stack.pop()))
        case "REDUCE":
            arguments = stack.pop()
            stack.append(_called(stack.pop(), arguments))
        case _:
            raise NotATensor(f"its pickle has the instruction {name}")


def _since_mark(stack: list[Any]) -> list[Any]:
    """What came onto the stack behind the last mark, which is gone with it."""
    at = len(stack) - 1
    while stack[at] is not _MARK:
        at -= 1
    found = stack[at + 1 :]
    del stack[at:]
    return found


def _into(found: Any, items: list[Any]) -> None:
    if type(found) is not dict or len(items) % 2:
        raise NotATensor("it is no plain tensor")
    found.update(zip(items[::2], items[1::2], strict=True))


def _known(name: str) -> _Name:
    if name not in STORAGES and name not in (TENSOR, PARAMETER, HOOKS):
        shown = name.replace(" ", ".")[:80]
        raise NotATensor(f"its pickle names {shown}; a tensor of float32, float16 or bfloat16 is taken")
    return _Name(name)


def _storage(found: Any) -> _Storage:
    kind, storage, key, _place, count = found
    if kind != "storage" or not isinstance(storage, _Name) or not isinstance(key, str) or type(count) is not int:
        raise NotATensor("it is no plain tensor")
    return _Storage(STORAGES[storage], key, count)


def _called(function: Any, arguments: Any) -> Any:
    if not isinstance(function, _Name):
        raise NotATensor("it is no plain tensor")
    if function == TENSOR:
        storage, offset, size, stride, *_ = arguments
        numbers = (offset, *size, *stride)
        whole = all(type(number) is int and 0 <= number < 1 << 40 for number in numbers)
        if not (isinstance(storage, _Storage) and whole and len(size) == len(stride) <= 4):
            raise NotATensor("it is no plain tensor")
        return _Tensor(storage, offset, tuple(size), tuple(stride))
    if function == PARAMETER:
        return arguments[0]
    if function == HOOKS and arguments == ():  # a dictionary of weights, or the hooks of a tensor, which it has not
        return {}
    raise NotATensor("it is no plain tensor")
