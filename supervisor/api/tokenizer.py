"""The mesh's tokenizer and chat template, for scripts that want them by themselves: `LLM.get_tokenizer()`.

Names and arguments are those of Hugging Face tokenizers, as far as they go; a detokenizer does the work.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import msgspec

from meshlm.protocol.edges.text import ChatPrompt, Prompt, TextPrompt
from meshlm.runtime.errors import RequestError
from meshlm.runtime.mesh.messages import check_messages, check_template_kwargs, check_tools
from meshlm.supervisor.errors import raised_as


class Tokenizer:
    """`ids` gives the token ids of a prompt, `text` the text of ids."""

    def __init__(self, ids: Callable[[Prompt], list[int]], text: Callable[[Sequence[int]], str], size: int) -> None:
        self._ids, self._text = ids, text
        self.vocab_size = size

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._ids(TextPrompt(text, add_special_tokens))

    def decode(self, token_ids: int | Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self._text([token_ids] if isinstance(token_ids, int) else list(token_ids))

    @overload
    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: Literal[False], **options: Any
    ) -> str: ...
    @overload
    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: Literal[True] = True, **options: Any
    ) -> list[int]: ...
    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """A conversation as a prompt: its token ids, or with tokenize=False its text."""
        template = (chat_template, template_kwargs, add_generation_prompt, continue_final_message)
        ids = self._ids(chat_prompt(conversation, tools, *template))
        return ids if tokenize else self._text(ids)


def chat_prompt(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    chat_template: str | None,
    template_kwargs: dict[str, Any] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    add_special_tokens: bool = False,
    media: bool = False,
) -> ChatPrompt:
    """A conversation for the mesh. media: it may have images. ValueError says what of it no template could show."""
    with raised_as(ValueError, RequestError):
        check_messages(messages, media=media)
        check_tools(tools or [])
        check_template_kwargs(template_kwargs or {})
    return ChatPrompt(
        messages_json=msgspec.json.encode(messages),
        tools_json=msgspec.json.encode(tools) if tools else b"",
        chat_template=chat_template or "",
        template_kwargs_json=msgspec.json.encode(template_kwargs) if template_kwargs else b"",
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
        add_special_tokens=add_special_tokens,
    )
