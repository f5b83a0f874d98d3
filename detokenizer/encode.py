"""Prompts to token ids, in threads: a 2,000-token prompt takes 4 ms, which no running stream should wait for. Called by io.py."""

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal

import msgspec

from meshlm.detokenizer.events import Truncation
from meshlm.detokenizer.extras import Encoding
from meshlm.detokenizer.infill import infilled
from meshlm.detokenizer.media import expanded, with_texts
from meshlm.detokenizer.mixed import Mixer
from meshlm.detokenizer.templates import ChatTemplate
from meshlm.protocol.edges import text as edge
from meshlm.protocol.edges.text import ChatPrompt, MediaPrompt, PairPrompt, Prompt, TextPrompt, TokenPrompt
from meshlm.protocol.extras import find_extra
from meshlm.protocol.media import Media, Modality
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime import bad_words
from meshlm.runtime.errors import RequestError
from meshlm.runtime.mesh.messages import modality_of
from meshlm.runtime.model_files.tokenizer_files import LoadedTokenizer, token_bytes

REASONING = ("reasoning_content", "thinking", "reasoning")  # its names in messages; a template may read any of them
Marks = Mapping[Modality, str]  # the placeholders that stand for items in a text
NO_MARKS: Marks = {}
ContentFormat = Literal["auto", "string", "openai"]


class Encoder:
    """Stateless but for compiled templates; safe to call from several threads."""

    def __init__(
        self,
        loaded: LoadedTokenizer,
        chat_templates: Mapping[str, str],
        content_format: ContentFormat = "auto",
        *,
        lower_case: bool = False,
        types: bool = False,
    ) -> None:
        """RequestError for a source that is no template. lower_case: all texts. types: the model tells a pair's texts apart."""
        self._lower_case, self._types = lower_case, types
        self._tokenizer, self._content_format = loaded.tokenizer, content_format
        self._special, self._loaded = loaded.special_tokens, loaded
        self.tokens_with = lru_cache(1024)(self._tokens_with)
        self._mixer: Mixer | None = None  # made for the first chat that has vectors in it
        self._templates = {name: ChatTemplate(source, self._special) for name, source in chat_templates.items()}

    def encode(self, prompt: Prompt) -> "array[int]":
        """The prompt's ids. RequestError for what the template or the text does not allow."""
        match prompt:
            case TokenPrompt():
                return array("i", prompt.token_ids)
            case TextPrompt():
                return self._infilled(prompt) if prompt.suffix else self._ids(prompt.text, prompt.add_special_tokens)
            case ChatPrompt():
                return self._ids(self.render(prompt), prompt.add_special_tokens)
            case MediaPrompt():
                media = find_extra(prompt.media, Media)
                return self.encode(prompt.prompt) if media is None else self._with_media(prompt, media)[0]
            case PairPrompt():
                return self._pair(prompt, None)[0]
            case edge.JoinedPrompt(parts=parts):
                joined = array("i")
                for part in parts:
                    joined += self.encode(part)
                return joined

    def encode_prompt(self, prompt: Prompt, truncation: Truncation | None) -> Encoding:
        """The prompt's ids, and what its extras are prepared by."""
        if (media := find_extra(edge.media_of(prompt), Media)) is not None:
            ids, media = self._with_media(prompt, media)
            return Encoding(ids, self.text_of, media=(media,), tokens_with=self.tokens_with)
        if isinstance(prompt, MediaPrompt) and isinstance(prompt.prompt, ChatPrompt):
            ids, embeds = self.encode_mixed(prompt)
            return Encoding(ids, self.text_of, media=(embeds,), tokens_with=self.tokens_with)
        ids, second_from = self.encode_whole(prompt, truncation)
        return Encoding(ids, self.text_of, second_from, edge.media_of(prompt), self.tokens_with)

    def encode_whole(self, prompt: Prompt, truncation: Truncation | None) -> tuple["array[int]", int]:
        """The prompt's ids, and Pool.second_from. Truncation keeps the tokens around a text."""
        if isinstance(prompt, PairPrompt):
            return self._pair(prompt, truncation)
        ids = self.encode(prompt)
        if truncation is not None and len(ids) > truncation.keep and isinstance(prompt, TextPrompt | ChatPrompt):
            text = self.render(prompt) if isinstance(prompt, ChatPrompt) else prompt.text
            plain = self._plain(text)
            around = self._tokenizer.num_special_tokens_to_add(False) if prompt.add_special_tokens else 0
            plain.truncate(max(0, truncation.keep - around), direction=truncation.side)
            if prompt.add_special_tokens:
                plain = self._tokenizer.post_process(plain)
            return array("i", plain.ids), 0
        return ids, 0

    def encode_mixed(self, prompt: MediaPrompt) -> tuple["array[int]", PromptEmbeds]:
        """The ids of a chat with vectors in it, and the vectors by their places."""
        if self._mixer is None:  # two threads may both make one
            self._mixer = Mixer(self._tokenizer)
        chat, vectors = prompt.prompt, [one for one in prompt.media if isinstance(one, PromptEmbeds)]
        assert isinstance(chat, ChatPrompt)
        return self._mixer.encode(self.render(chat), vectors, add_special_tokens=chat.add_special_tokens)

    def _with_media(self, prompt: Prompt, media: Media) -> tuple["array[int]", Media]:
        """The ids of a prompt with media, and these with their positions. RequestError."""
        assert isinstance(prompt, MediaPrompt)
        param = "messages" if isinstance(prompt.prompt, ChatPrompt) else "prompt"
        match prompt.prompt:
            case ChatPrompt() as chat:
                marks = {item.modality: self._tokenizer.id_to_token(item.placeholder) or "" for item in media.items}
                text, add_special_tokens = self.render(chat, marks), chat.add_special_tokens
            case TextPrompt(text=text, add_special_tokens=add_special_tokens):
                pass
            case _:
                return expanded(self.encode(prompt.prompt), media, param)
        text = with_texts(text, media, lambda token: self._tokenizer.id_to_token(token) or "")
        return expanded(self._ids(text, add_special_tokens), media, param)

    def _pair(self, prompt: PairPrompt, truncation: Truncation | None) -> tuple["array[int]", int]:
        first, second = self._plain(prompt.first), self._plain(prompt.second)
        for text, most in ((first, prompt.max_first), (second, prompt.max_second)):
            if most:
                text.truncate(most)
        if prompt.joined:
            if prompt.max_first or prompt.max_second:
                ids = array("i", first.ids + second.ids)
            else:
                ids = self._ids(prompt.first + prompt.second, True)
            keep = len(ids) if truncation is None else truncation.keep
            return (ids[:keep] if truncation is None or truncation.side == "right" else ids[-keep:]), 0
        if truncation is not None:
            room = max(0, truncation.keep - self._tokenizer.num_special_tokens_to_add(True))
            short, long = (first, second) if len(first.ids) <= len(second.ids) else (second, first)
            if len(short.ids) + len(long.ids) > room:  # the longer text is cut first, and then both
                short.truncate(min(len(short.ids), room // 2), direction=truncation.side)
                long.truncate(room - len(short.ids), direction=truncation.side)
        both = self._tokenizer.post_process(first, second)
        types = both.type_ids
        return array("i", both.ids), types.index(1) if self._types and 1 in types else 0

    def offsets(self, prompt: Prompt) -> tuple["array[int]", "array[int]"]:
        """The prompt's ids, and where each token begins and ends in its text, the template's where there is one."""
        if not isinstance(prompt, TextPrompt | ChatPrompt) or (isinstance(prompt, TextPrompt) and prompt.suffix):
            return self.encode(prompt), array("i")
        text = prompt.text if isinstance(prompt, TextPrompt) else self.render(prompt)
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=prompt.add_special_tokens)
        return array("i", encoding.ids), array("i", [place for pair in encoding.offsets for place in pair])

    def assistant_mask(self, prompt: Prompt) -> tuple["array[int]", bytes]:
        """The prompt's ids, and for each whether the template marks it as the assistant's, as 0 or 1; none where it marks nothing."""
        if not isinstance(prompt, ChatPrompt) or not (template := self._template(prompt)).marks:
            return self.encode(prompt), b""
        text, spans = template.spans(lambda: self.render(prompt))
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=prompt.add_special_tokens)
        mask = bytearray(len(encoding.ids))
        places = encoding.offsets
        for begin, end in spans:
            inside = [at for at, (first, last) in enumerate(places) if first < end and begin < last and first < last]
            for at in inside:
                mask[at] = 1
        return array("i", encoding.ids), bytes(mask)

    def text_of(self, token_ids: "array[int]") -> str:
        """The text of token ids, special tokens included."""
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)
        return str(text)

    def _tokens_with(self, text: str) -> frozenset[int]:
        data = text.encode("utf-8", "surrogatepass")
        return frozenset(token for token, own in enumerate(self._bytes) if data in own)

    @cached_property
    def _bytes(self) -> list[bytes]:
        return token_bytes(self._loaded)

    def _infilled(self, prompt: TextPrompt) -> "array[int]":
        begin = array("i")
        if prompt.add_special_tokens:  # those that the tokenizer puts before any text
            plain, whole = self._ids("a", False), self._ids("a", True)
            begin = whole[: next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)]
        prefix, suffix = self._ids(prompt.text, False), self._ids(prompt.suffix, False)
        return infilled(prefix, suffix, begin, self._tokenizer.token_to_id)

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The sequences of tokens that write these words (runtime/bad_words.py)."""
        if not words:
            return ()
        return bad_words.sequences(words, self._each, self._tokenizer.id_to_token, self._tokenizer.token_to_id)

    def _each(self, texts: list[str]) -> list[tuple[int, ...]]:
        texts = [text.lower() for text in texts] if self._lower_case else texts
        return [tuple(found.ids) for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _ids(self, text: str, add_special_tokens: bool) -> "array[int]":
        return array("i", self._plain(text, add_special_tokens).ids)

    def _plain(self, text: str, add_special_tokens: bool = False) -> Any:
        text = text.lower() if self._lower_case else text
        # Of the tokenizer's methods only those for batches let go of the interpreter's lock: else all threads would wait for this one.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def render(self, prompt: ChatPrompt, marks: Marks = NO_MARKS) -> str:
        """The template's text. marks: the placeholders, for templates that know no parts."""
        template = self._template(prompt)
        messages = msgspec.json.decode(prompt.messages_json, type=list[dict[str, Any]])
        return template.render(prompt, [self._message(message, template, marks) for message in messages])

    def _template(self, prompt: ChatPrompt) -> ChatTemplate:
        """The request's own, or its choice of the model's; else the one for tools where there are some."""
        if prompt.chat_template:
            named = self._templates.get(prompt.chat_template)
            return named if named is not None else ChatTemplate(prompt.chat_template, self._special)
        name = "tool_use" if prompt.tools_json and "tool_use" in self._templates else "default"
        if name in self._templates:
            return self._templates[name]
        text = "this model has no chat template; give one with chat_template or --chat-template"
        if self._templates:
            names = ", ".join(sorted(self._templates))
            text = f"this model has no default chat template; name one of its own with --chat-template: {names}"
        raise RequestError(ErrorKind.INVALID, text, "messages")

    def _message(self, message: dict[str, Any], template: ChatTemplate, marks: Marks = NO_MARKS) -> dict[str, Any]:
        """Gives the message as templates expect it: no nulls; the content in their form; the arguments of tool calls as objects, where
        OpenAI's clients send them as JSON text; reasoning by the names that templates know."""
        found = {key: value for key, value in message.items() if value is not None}
        found["content"] = self._content(found.get("content"), template, marks, is_tool=message.get("role") == "tool")
        reasoning = next((found[name] for name in REASONING if name in found), None)
        if reasoning is not None:
            found = {"thinking": reasoning, "reasoning": reasoning, **found, "reasoning_content": reasoning}
        calls = found.get("tool_calls")
        if isinstance(calls, list):
            found["tool_calls"] = [_call(call) for call in calls]
        if not calls:
            found.pop("tool_calls", None)  # some templates look for the name alone
        return found

    def _content(self, content: Any, template: ChatTemplate, marks: Marks, *, is_tool: bool) -> Any:
        """Text, parts on lines of their own; or a list of parts, for a template that goes through them. A tool's result is text where
        the template can take it: the parts that templates look for there are others."""
        if self._content_format != "auto":
            parts = self._content_format == "openai"
        elif isinstance(content, list):
            parts = template.loops
        else:
            parts = template.loops and not template.tests_text
        given = [content] if isinstance(content, str) else content or ()
        refers = any(map(_is_reference, given))
        if is_tool and template.tests_text and not refers:
            parts = False
        if is_tool and refers and template.loops:
            parts = True
        if not parts:  # media first, as in vLLM
            media = [marks.get(one, "") for one in map(modality_of, given) if one is not None]
            return "\n".join([*media, *(_part(part) for part in given if modality_of(part) is None)])
        return [
            part if _is_reference(part) or modality_of(part) is not None else {"type": "text", "text": _part(part)}
            for part in given
        ]


def _part(part: Any) -> str:
    return str(part.get("text", part.get("refusal", part.get("name", "")))) if isinstance(part, dict) else str(part)


def _is_reference(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "tool_reference"


def _call(call: Any) -> Any:
    """A call with its arguments as an object. Those that are none, as where max_tokens cut them, are shown as text: an answer that was
    given must do as history."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), dict | list):
        return call
    text = function.get("arguments") or "{}"
    if not isinstance(text, str):
        wrong = f"tool_calls: the arguments of {function.get('name')!r} are neither text nor an object"
        raise RequestError(ErrorKind.INVALID, wrong, "messages")
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        arguments = text
    if arguments is None:
        arguments = {}
    elif not isinstance(arguments, dict | list):
        arguments = {"arguments": text}
    return {**call, "function": {**function, "arguments": arguments}}
