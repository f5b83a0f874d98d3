"""Prompts to token ids, in threads: a 2,000-token prompt takes 4 ms, which no running stream should wait for. Called by io.py."""

from array import array
from typing import Any

import msgspec

from meshlm.detokenizer.templates import ChatTemplate
from meshlm.detokenizer.tokenizer_files import LoadedTokenizer
from meshlm.protocol.ids import ErrorKind
from meshlm.protocol.text_edge import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from meshlm.runtime.errors import RequestError


class Encoder:
    """Stateless but for compiled templates; safe to call from several threads."""

    def __init__(self, loaded: LoadedTokenizer, chat_template: str) -> None:
        self._tokenizer = loaded.tokenizer
        self._special = loaded.special_tokens
        self._default = ChatTemplate(chat_template, loaded.special_tokens) if chat_template else None

    def encode(self, prompt: Prompt) -> "array[int]":
        """The prompt's ids. RequestError for what the template or the text does not allow."""
        match prompt:
            case TokenPrompt():
                return array("i", prompt.token_ids)
            case TextPrompt():
                return self._ids(prompt.text, prompt.add_special_tokens)
            case ChatPrompt():
                return self._ids(self.render(prompt), prompt.add_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> "array[int]":
        # Of the tokenizer's methods only those for batches let go of the interpreter's lock: else all threads would wait for this one.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("i", encoding.ids)

    def render(self, prompt: ChatPrompt) -> str:
        """The conversation as the model's text."""
        template = ChatTemplate(prompt.chat_template, self._special) if prompt.chat_template else self._default
        if template is None:
            text = "this model has no chat template; give one with chat_template or --chat-template"
            raise RequestError(ErrorKind.INVALID, text, "messages")
        messages = [_plain(message) for message in msgspec.json.decode(prompt.messages_json, type=list[dict[str, Any]])]
        tools = msgspec.json.decode(prompt.tools_json) if prompt.tools_json else None
        extra = msgspec.json.decode(prompt.template_kwargs_json) if prompt.template_kwargs_json else {}
        return template.render(
            messages,
            tools,
            extra,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
        )


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """As templates expect it: the content one string, parts on lines of their own, "" where there is none; the arguments of tool
    calls as objects, where OpenAI's clients send them as JSON text; reasoning by the name that templates know."""
    found = dict(message)
    content = found.get("content")
    if content is None or isinstance(content, list):
        found["content"] = "\n".join(_part(part) for part in content or ())
    if "reasoning" in found:
        found.setdefault("reasoning_content", found["reasoning"])
    calls = found.get("tool_calls")
    if isinstance(calls, list):
        found["tool_calls"] = [_call(call) for call in calls]
    if not calls:
        found.pop("tool_calls", None)  # some templates look for the name alone
    return found


def _part(part: Any) -> str:
    return str(part.get("text", part.get("refusal", ""))) if isinstance(part, dict) else str(part)


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), dict | list):
        return call
    try:
        arguments = msgspec.json.decode(function.get("arguments") or "{}")
    except (msgspec.DecodeError, TypeError) as error:
        text = f"tool_calls: the arguments of {function.get('name')!r} are not valid JSON: {error}"
        raise RequestError(ErrorKind.INVALID, text, "messages") from None
    return {**call, "function": {**function, "arguments": arguments}}
