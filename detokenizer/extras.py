"""What becomes of a request's extras when its prompt is encoded: `prepare` has a case for each kind that needs the tokens.

Called in the threads that encode. Grammars are compiled before that, by grammar_threads.py.
"""

from array import array
from collections.abc import Callable
from functools import singledispatch
from typing import NamedTuple

from msgspec.structs import replace

from meshlm.protocol.adapters import Adapter
from meshlm.protocol.audio import Audio
from meshlm.protocol.extras import Extra, Extras, find_extra
from meshlm.protocol.grammar import Grammar
from meshlm.protocol.pool import Pool
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.protocol.samplers import SequenceBreakers
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError
from meshlm.runtime.parsers import budgets


class Encoding(NamedTuple):
    """An encoded prompt. `text_of` decodes token ids, special tokens included."""

    token_ids: "array[int]"
    text_of: "Callable[[array[int]], str]"
    second_from: int = 0  # the place of the second text of a pair; 0: there is none
    media: Extras = ()  # of the prompt, by their places among token_ids
    tokens_with: "Callable[[str], frozenset[int]]" = lambda text: frozenset()  # those whose text holds this one


@singledispatch
def prepare(extra: Extra, encoding: Encoding) -> Extra:
    """The extra as schedulers and workers need it."""
    return extra


@prepare.register
def _(extra: Pool, encoding: Encoding) -> Pool:
    return replace(extra, second_from=encoding.second_from) if encoding.second_from else extra


@prepare.register
def _(extra: PromptEmbeds, encoding: Encoding) -> PromptEmbeds:
    return replace(extra, token_ids=b"")  # the prompt has them


@prepare.register
def _(extra: Grammar, encoding: Encoding) -> Grammar:
    """The text says whether the prompt begins the reasoning already; vectors say nothing, nor what stands before them."""
    if extra.thinking is None or not extra.thinking.in_prompt:
        return extra
    vectors = find_extra(encoding.media, PromptEmbeds)
    text = encoding.text_of(encoding.token_ids if vectors is None else encoding.token_ids[sum(vectors.spans[-1]) :])
    return replace(extra, thinking=budgets.seen(extra.thinking, text))


@prepare.register
def _(extra: SequenceBreakers, encoding: Encoding) -> SequenceBreakers:
    found = frozenset[int]().union(*map(encoding.tokens_with, extra.texts))
    return replace(extra, token_ids=array("i", sorted(found)).tobytes())


@prepare.register
def _(extra: Adapter, encoding: Encoding) -> Adapter:
    return extra.in_prompt(encoding.token_ids)


def check_audio(extras: Extras, max_audio_samples: int) -> None:
    """RequestError where audio is missing, or has not 1 to `max_audio_samples` samples. 0: the model takes no audio."""
    audio, text = find_extra(extras, Audio), ""
    if audio is None and max_audio_samples:
        text = "this model transcribes audio: the prompt needs some"
    elif audio is not None and not max_audio_samples:
        text = "this model takes no audio"
    elif audio is not None and not 0 < audio.num_samples <= max_audio_samples:
        text = f"the audio has {audio.num_samples} samples; it must have 1 to {max_audio_samples}"
    if text:
        raise RequestError(ErrorKind.INVALID, text, "prompt")
