"""The prompts of `LLM.generate` as the mesh takes them. Pure; used by llm.py. ValueError names what is no prompt, or not supported."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshlm.protocol.columns import pack_i32
from meshlm.protocol.text_edge import Prompt, TextPrompt, TokenPrompt

OnePrompt = str | Sequence[int] | Mapping[str, Any]
NOT_SUPPORTED = {
    **dict.fromkeys(
        ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"), "images, sound and video are not supported"
    ),
    **dict.fromkeys(("prompt_embeds", "prompt_is_token_ids"), "a prompt is text or token ids"),
    **dict.fromkeys(("encoder_prompt", "decoder_prompt"), "encoder-decoder models are not supported"),
    "token_type_ids": "LLM.score gives a pair's texts their types",
}


class Given(NamedTuple):
    """One prompt; `text` is what RequestOutput.prompt says."""

    prompt: Prompt
    text: str | None
    cache_salt: str = ""


def many(prompts: Any) -> list[Any]:
    """One prompt or several, as a list."""
    single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if single else list(prompts)


def of_generate(item: Any, *, add_special_tokens: bool = True) -> Given:
    """Text, token ids, or a dict of either."""
    if not isinstance(item, Mapping):
        prompt = _prompt(item, add_special_tokens)
        return Given(prompt, prompt.text if isinstance(prompt, TextPrompt) else None)
    for name, value in item.items():
        if name in NOT_SUPPORTED and value is not None and not (isinstance(value, Mapping | list) and not value):
            raise ValueError(f"a prompt's {name!r}: not supported; {NOT_SUPPORTED[name]}")
        if name not in NOT_SUPPORTED and name not in ("prompt", "prompt_token_ids", "cache_salt"):
            raise ValueError(f"a prompt has no key {name!r}; it has 'prompt' or 'prompt_token_ids', and 'cache_salt'")
    given = [item[name] for name in ("prompt_token_ids", "prompt") if item.get(name) is not None]
    if not given:
        raise ValueError("a prompt that is a dict needs 'prompt' or 'prompt_token_ids'")
    salt = item.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError("a prompt's 'cache_salt': must be text, and not empty")
    text = item.get("prompt")
    if not isinstance(text, str | None):
        raise ValueError("a prompt's 'prompt': must be text")
    return Given(_prompt(given[0], add_special_tokens), text, salt or "")


def of_tokenization(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The supported settings of tokenization_kwargs."""
    known = ("add_special_tokens", "truncate_prompt_tokens")
    for name in given or {}:
        if name not in known:
            raise ValueError(f"tokenization_kwargs: {name!r} is not supported; {' and '.join(known)} are")
    return dict(given or {})


def _prompt(item: Any, add_special_tokens: bool) -> Prompt:
    if isinstance(item, str):
        return TextPrompt(item, add_special_tokens)
    try:
        return TokenPrompt(pack_i32(item))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"a prompt is text, token ids, or a dict of either: {error}") from None
