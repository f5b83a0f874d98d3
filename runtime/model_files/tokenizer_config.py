"""What the files beside a tokenizer.json say of its tokens: which are special, which are added, which one ends a text.

The supervisor asks for the end, the detokenizer for all of it. The rules are those of transformers, which takes add_bos_token and
add_eos_token from the tokenizer.json alone; padding and the length that a tokenizer was made for say nothing about generation.
"""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.json_files import read_json

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")


class AddedToken(Struct, frozen=True, kw_only=True):
    """A token that is looked for before the text is split. Field names are those of the tokenizers library."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class TokenizerConfig(Struct, frozen=True, kw_only=True):
    """Beside the tokenizer.json."""

    special_tokens: dict[str, str]  # bos_token, eos_token and the like: texts
    added: tuple[AddedToken, ...]  # in the order of their ids
    special: tuple[AddedToken, ...]  # what is special beside; they may have ids already
    split_special_tokens: bool  # in a text special tokens are text


class _Numbered(Struct):
    id: int
    content: str


class _Model(Struct):
    vocab: Any = None


class _Tokenizer(Struct):
    """The parts of a tokenizer.json that say which id a token has."""

    added_tokens: list[_Numbered] = []
    model: _Model = msgspec.field(default_factory=_Model)


def read(folder: Path) -> TokenizerConfig:
    """Reads the files in a tokenizer's folder, if there are any. ModelFilesError."""
    file = folder / "tokenizer_config.json"
    config = _optional(file)
    files, added = [file], {}
    special: dict[str, AddedToken] = {}
    extra: dict[str, list[AddedToken]] = {}
    try:
        if "added_tokens_decoder" in config:
            listed = msgspec.convert(config["added_tokens_decoder"], dict[str, AddedToken])
            added = {int(index): token for index, token in listed.items()}
        else:
            files.append(folder / "special_tokens_map.json")
        for file in files:
            content = _optional(file)
            special |= {name: _special(content[name]) for name in NAMES if content.get(name)}
            more = {name: _several(content[name]) for name in _EXTRA if name in content}
            extra |= {name: [_special(token) for token in tokens] for name, tokens in more.items()}
        rest = [*special.values(), *(token for tokens in extra.values() for token in tokens)]
        if "added_tokens_decoder" not in config:
            file, known = folder / "added_tokens.json", {token.content for token in rest}
            for text, index in msgspec.convert(_optional(file), dict[str, int]).items():
                added[index] = AddedToken(content=text, special=text in known, normalized=text not in known)
    except (msgspec.ValidationError, ValueError) as error:
        raise ModelFilesError(f"{file}: {error}") from None
    return TokenizerConfig(
        special_tokens={name: token.content for name, token in special.items()},
        added=tuple(added[index] for index in sorted(added)),
        special=tuple(rest),
        split_special_tokens=config.get("split_special_tokens") is True,
    )


def eos_token_id(tokenizer: Path) -> int | None:
    """The id of the tokenizer's eos_token: it ends a text beside those of a generation config, as in vLLM. ModelFilesError.

    Most tokenizer.json say it themselves. Where another file adds the token, its id is the one that it gets where texts are encoded,
    so the tokenizer is loaded as it is there."""
    folder, file = (tokenizer, tokenizer / "tokenizer.json") if tokenizer.is_dir() else (tokenizer.parent, tokenizer)
    if tokenizer.suffix == ".gguf" or not file.is_file():
        return None
    text = read(folder).special_tokens.get("eos_token")
    if text is None:
        return None
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelFilesError(f"{file}: not a tokenizer ({error})") from None
    index = next((token.id for token in found.added_tokens if token.content == text), None)
    if index is None and isinstance(found.model.vocab, dict):
        index = found.model.vocab.get(text)
    if isinstance(index, int):
        return index
    from meshlm.runtime.model_files import tokenizer_files  # 40 ms that most starts do not need

    return tokenizer_files.load(tokenizer).tokenizer.token_to_id(text)


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _several(given: Any) -> list[Any]:
    """Tokens of a list, or of an object by names."""
    return list(given.values()) if isinstance(given, dict) else given if isinstance(given, list) else []


def _special(given: Any) -> AddedToken:
    """A special token as a file holds it: a text, or an object."""
    token = AddedToken(content=given) if isinstance(given, str) else msgspec.convert(given, AddedToken)
    return msgspec.structs.replace(token, special=True)
