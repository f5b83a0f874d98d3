"""How a request has its answer's text: what ends it, and what may not be in it. HttpError says which limit that passes."""

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.schema import MAX_BAD_WORDS, MAX_STOP_LENGTH, MAX_STOP_STRINGS, Common
from meshlm.protocol.edges.text import TextParams


def text_params(request: Common, truncation: int, keep_special_tokens: tuple[str, ...]) -> TextParams:
    """The settings for the detokenizer."""
    return TextParams(
        stop=_stops(request.stop),
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
        truncate_prompt_tokens=truncation,
        truncation_side=request.truncation_side or "left",
        bad_words=_bad_words(request.bad_words or []),
        keep_special_tokens=keep_special_tokens,
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else (stop or [])
    if len(texts) > MAX_STOP_STRINGS:
        raise HttpError(400, f"stop: {len(texts)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
    if any(not 1 <= len(text) <= MAX_STOP_LENGTH for text in texts):
        raise HttpError(400, f"stop: each string must have 1 to {MAX_STOP_LENGTH} characters", "stop")
    return tuple(texts)


def _bad_words(words: list[str]) -> tuple[str, ...]:
    if len(words) > MAX_BAD_WORDS:
        raise HttpError(400, f"bad_words: {len(words)} words; at most {MAX_BAD_WORDS} are allowed", "bad_words")
    if not all(1 <= len(word) <= MAX_STOP_LENGTH and word.strip() for word in words):
        raise HttpError(
            400, f"bad_words: each must have 1 to {MAX_STOP_LENGTH} characters, not blanks alone", "bad_words"
        )
    return tuple(words)
