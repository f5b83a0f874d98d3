"""Prompts with media: in the place of each placeholder come the tokens that stand for its item. Called by encode.py.

The chat template writes one placeholder for each item, and the model's processor says what text stands around it. The n-th placeholder
is the n-th item's, wherever the template moves it, as for the model's own processor.
"""

from array import array
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from meshlm.protocol.media import Media, MediaItem, Modality
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError

Texts = Callable[[int], str]  # the text of a placeholder's token


def with_texts(text: str, media: Media, text_of: Texts) -> str:
    """The text with what stands around the placeholders: the n-th item's around the n-th placeholder of its kind."""
    for placeholder, items in by_placeholder(media).items():
        mark = text_of(placeholder)
        if not mark or not any(item.before or item.after for item in items):
            continue
        first, *others = text.split(mark)
        if len(others) == len(items):  # else `expanded` refuses the prompt
            pairs = zip(items, others, strict=True)
            text = first + "".join(f"{item.before}{mark}{item.after}{other}" for item, other in pairs)
    return text


def by_placeholder(media: Media) -> dict[int, list[MediaItem]]:
    """The items by the token that a template writes for them, in their order."""
    found: dict[int, list[MediaItem]] = {}
    for item in media.items:
        found.setdefault(item.placeholder, []).append(item)
    return found


def expanded(ids: "array[int]", media: Media, param: str = "messages") -> tuple["array[int]", Media]:
    """The ids with the items' tokens, and the items with their positions. RequestError where there are more or fewer placeholders; it
    names this field of the client's."""
    left = by_placeholder(media)
    for placeholder, items in left.items():
        if (count := ids.count(placeholder)) != len(items):
            raise RequestError(ErrorKind.INVALID, _mismatch(items, count, param), param)
    found, placed, begin = array("i"), list[MediaItem](), 0
    taken = {placeholder: iter(items) for placeholder, items in left.items()}
    for place in _places(ids, left):
        found += ids[begin:place]
        item = next(taken[ids[place]])
        placed.append(replace(item, position=len(found)))
        found += array("i", item.replacement)
        begin = place + 1
    return found + ids[begin:], replace(media, items=tuple(placed))


def _places(ids: "array[int]", wanted: dict[int, list[MediaItem]]) -> list[int]:
    """Where placeholders stand: searched for one by one, as prompts are long and have few."""
    found = []
    for placeholder, items in wanted.items():
        at = -1
        for _ in items:
            at = ids.index(placeholder, at + 1)
            found.append(at)
    return sorted(found)


def _mismatch(items: Sequence[MediaItem], count: int, param: str) -> str:
    modality = items[0].modality
    text = f"{param}: the prompt has {count} placeholders for {len(items)} {_several(modality)}"
    if count > len(items):
        return f"{text}; a text must not have the placeholder in it"
    return f"{text}: {'the chat template leaves some out' if param == 'messages' else f'each {modality} needs one'}"


def _several(modality: Modality) -> str:
    return "audio clips" if modality is Modality.AUDIO else f"{modality}s"
