"""Loads a tokenizer: a Hugging Face tokenizer.json, or one built from a .gguf file's metadata. No torch, no transformers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer

from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files import gguf_tokenizer, tokenizer_config


class LoadedTokenizer(NamedTuple):
    """A tokenizer and what templates need to know of it."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]  # bos_token, eos_token and the like: texts
    special_ids: frozenset[int]  # skipped with skip_special_tokens
    byte_level: bool


def load(path: Path) -> LoadedTokenizer:
    """`path` is a folder with tokenizer.json, such a file, or a .gguf file. ModelFilesError says what is missing."""
    if path.suffix == ".gguf":
        return _describe(*gguf_tokenizer.build(path))
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    if not file.is_file():
        raise ModelFilesError(f"{folder}: no tokenizer.json there; give a folder or file that has one with --tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelFilesError(f"{file}: not a tokenizer ({error})") from None
    config = tokenizer_config.read(folder)
    tokenizer.no_truncation()  # trainers leave their own settings in the file, which would cut prompts
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = config.split_special_tokens
    known = {_form(token) for token in tokenizer.get_added_tokens_decoder().values()}
    _add(tokenizer, [token for token in config.added if _form(token) not in known])
    names = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    _add(tokenizer, [token for token in config.special if token.content not in names])
    return _describe(tokenizer, config.special_tokens)


def _form(token: AddedToken | tokenizer_config.AddedToken) -> tuple[object, ...]:
    return tuple(getattr(token, name) for name in tokenizer_config.AddedToken.__struct_fields__)


def _add(tokenizer: Tokenizer, tokens: Iterable[tokenizer_config.AddedToken]) -> None:
    """Tokens of the files beside, which the tokenizer.json has not, or has in another form."""
    tokenizer.add_tokens([AddedToken(**msgspec.structs.asdict(token)) for token in tokens])


def _describe(tokenizer: Tokenizer, special: dict[str, str]) -> LoadedTokenizer:
    added = tokenizer.get_added_tokens_decoder()
    ids = {index for index, token in added.items() if token.special}
    ids |= {index for text in special.values() if (index := tokenizer.token_to_id(text)) is not None}
    byte_level = "ByteLevel" in type(tokenizer.decoder).__name__ or '"type":"ByteLevel"' in _decoder_json(tokenizer)
    return LoadedTokenizer(tokenizer, special, frozenset(ids), byte_level)


def _decoder_json(tokenizer: Tokenizer) -> str:
    return json.dumps(json.loads(tokenizer.to_str())["decoder"], separators=(",", ":")) if tokenizer.decoder else ""


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (openai/gpt-2, encoder.py: bytes_to_unicode), reversed."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(rest)})
    return alphabet


# For str.translate: stand-ins become their bytes, anything else what latin-1 does not have.
_TO_BYTES = {**dict.fromkeys(range(256), 0x100), **{ord(char): byte for char, byte in byte_alphabet().items()}}


def token_bytes(loaded: LoadedTokenizer) -> list[bytes]:
    """The bytes that each token of the vocabulary stands for, by id; none where an id has no token."""
    tokenizer = loaded.tokenizer
    added = tokenizer.get_added_tokens_decoder()
    found = []
    for index in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        token = tokenizer.id_to_token(index)
        if token is None:
            found.append(b"")
        elif index in added or not loaded.byte_level:
            found.append(_plain_bytes(token, index in added))
        else:
            found.append(_alphabet_bytes(token))
    return found


def _alphabet_bytes(token: str) -> bytes:
    """A byte-level token's bytes. Called for every token of the vocabulary while clients may wait."""
    try:
        return token.translate(_TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _plain_bytes(token: str, added: bool) -> bytes:
    """A SentencePiece or added token's bytes: <0xNN> is a byte, the low line a space."""
    if not added and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.encode() if added else token.replace("▁", " ").encode()
