"""Chats in which vectors stand between texts. Called by encode.py.

The template is filled in with a mark for each tensor, so that it may move messages as it likes. The marks become one special token of
a tokenizer of its own, as in vLLM: the texts around are tokenized as around any special token, and in other prompts the word is text.
"""

import re
from array import array
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer

from meshlm.protocol.prompt_embeds import PLACEHOLDER, PromptEmbeds
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError

_MARK = re.compile(r"<prompt_embeds:(\d+)>")


class Mixer:
    """A copy of a tokenizer that knows the placeholder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = False  # its file may want the tokens of special texts split
        self._tokenizer.add_special_tokens([AddedToken(PLACEHOLDER, special=True, normalized=False)])
        self._placeholder = self._tokenizer.token_to_id(PLACEHOLDER)

    def encode(
        self, text: str, vectors: Sequence[PromptEmbeds], *, add_special_tokens: bool
    ) -> tuple["array[int]", PromptEmbeds]:
        """The ids of a text with the marks of all `vectors`, and these by their places. RequestError for other marks."""
        order = [int(found) for found in _MARK.findall(text)]
        text = _MARK.sub(PLACEHOLDER, text)
        if sorted(order) != list(range(len(vectors))) or text.count(PLACEHOLDER) != len(order):
            why = f"the chat template leaves out or repeats prompt_embeds, or a text has {PLACEHOLDER} in it"
            raise RequestError(ErrorKind.INVALID, f"messages: {why}", "messages")
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids, spans, left = array("i"), [], iter(order)
        for token in encoding.ids:
            if token != self._placeholder:
                ids.append(token)
                continue
            column = array("i", vectors[next(left)].token_ids)
            spans.append((len(ids), len(column)))
            ids += column
        data, digests = (b"".join(columns) for columns in zip(*((vectors[n].data, vectors[n].digests) for n in order)))
        return ids, PromptEmbeds(vectors[0].dtype, tuple(spans), data, digests=digests)
