"""The texts that end an answer or may not be in it, as a request names them. HttpError says which limit they pass."""

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.schema import MAX_BAD_WORDS, MAX_STOP_LENGTH, MAX_STOP_STRINGS


def stops(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else (stop or [])
    if len(texts) > MAX_STOP_STRINGS:
        raise HttpError(400, f"stop: {len(texts)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
    if any(not 1 <= len(text) <= MAX_STOP_LENGTH for text in texts):
        raise HttpError(400, f"stop: each string must have 1 to {MAX_STOP_LENGTH} characters", "stop")
    return tuple(texts)


def bad_words(words: list[str]) -> tuple[str, ...]:
    if len(words) > MAX_BAD_WORDS:
        raise HttpError(400, f"bad_words: {len(words)} words; at most {MAX_BAD_WORDS} are allowed", "bad_words")
    if not all(1 <= len(word) <= MAX_STOP_LENGTH and word.strip() for word in words):
        raise HttpError(
            400, f"bad_words: each must have 1 to {MAX_STOP_LENGTH} characters, not blanks alone", "bad_words"
        )
    return tuple(words)
