"""Loads a tokenizer: a Hugging Face tokenizer.json, or one built from a .gguf file's metadata. No torch, no transformers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from meshlm.runtime import gguf_files, tokenizer_config
from meshlm.runtime.errors import ModelFilesError, ProcessFatal

# Pre-tokenizer patterns by GGUF's `tokenizer.ggml.pre`, as the models' own tokenizer.json have them.
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_PATTERNS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}
_DIGITS = {"smollm", "refact", "command-r", "starcoder"}  # every digit is a token
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_BOS_POSITION = "$A"
_OF_WORDPIECE = {
    "cls": "cls",
    "sep": "seperator",
    "unk": "unknown",
    "pad": "padding",
    "mask": "mask",
}  # llama.cpp's spelling


class LoadedTokenizer(NamedTuple):
    """A tokenizer and what templates need to know of it."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]  # bos_token, eos_token and the like: texts
    special_ids: frozenset[int]  # skipped with skip_special_tokens
    byte_level: bool


def load(path: Path) -> LoadedTokenizer:
    """`path` is a folder with tokenizer.json, such a file, or a .gguf file. ProcessFatal says what is missing."""
    if path.suffix == ".gguf":
        return _from_gguf(path)
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    if not file.is_file():
        raise ProcessFatal(f"{folder}: no tokenizer.json there; give a folder or file that has one with --tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ProcessFatal(f"{file}: not a tokenizer ({error})") from None
    try:
        config = tokenizer_config.read(folder)
    except ModelFilesError as error:
        raise ProcessFatal(str(error)) from None
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


def _from_gguf(path: Path) -> LoadedTokenizer:
    try:
        fields = gguf_files.read_header(path, lambda name: name.startswith("tokenizer.")).fields
    except gguf_files.GGUFError as error:
        raise ProcessFatal(str(error)) from None
    kind = fields.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4", "bert"):
        raise ProcessFatal(
            f"{path}: tokenizer {kind!r} is not supported (gpt2, llama, gemma4, bert); give one with --tokenizer"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if kind == "bert":
        return _wordpiece(path, fields, tokens, types)
    tokenizer = _byte_level(fields, tokens) if kind == "gpt2" else _sentencepiece(fields, tokens)
    control = [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types) if k == _CONTROL]
    user = [AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, types) if k == _USER_DEFINED]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user)
    special = {
        f"{name}_token": tokens[fields[key]]
        for name in ("bos", "eos", "unk", "pad")
        if (key := f"tokenizer.ggml.{'unknown' if name == 'unk' else 'padding' if name == 'pad' else name}_token_id")
        in fields
    }
    _add_bos_and_eos(tokenizer, fields, tokens, default_bos=kind != "gpt2")
    return _describe(tokenizer, special)


def _byte_level(fields: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """GPT-2 style BPE over bytes."""
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=False))
    pre = fields.get("tokenizer.ggml.pre", "default")
    steps: list[Any] = []
    if pre in _PATTERNS:
        steps.append(pre_tokenizers.Split(Regex(_PATTERNS[pre]), "isolated", invert=False))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        if pre.startswith(("qwen", "deepseek-r1-qwen")):
            tokenizer.normalizer = normalizers.NFC()
    else:
        if pre in _DIGITS:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", False))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """Llama's BPE, over characters with bytes for those that are no token; Gemma 4's files have its merges."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if fields["tokenizer.ggml.model"] == "gemma4":
        merges = [(left, right) for left, _, right in (one.partition(" ") for one in fields["tokenizer.ggml.merges"])]
        prefixed = bool(fields.get("tokenizer.ggml.add_space_prefix", False))
    else:
        merges = _merges_of(vocabulary, fields["tokenizer.ggml.scores"])
        prefixed = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    unknown = tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    if prefixed:
        steps.insert(0, normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _wordpiece(path: Path, fields: dict[str, Any], tokens: list[str], types: list[int]) -> LoadedTokenizer:
    """BERT's, in small letters without accents, as llama.cpp reads texts. Its files mark words and not what goes on with one."""
    pieces = [
        text if kind == _CONTROL else text[1:] if text.startswith("▁") else f"##{text}"
        for text, kind in zip(tokens, types, strict=True)
    ]
    ids = {f"{name}_token": fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in _OF_WORDPIECE.items()}
    special = {name: pieces[index] for name, index in ids.items() if index is not None}
    special = {
        f"{name}_token": f"[{name.upper()}]" for name in _OF_WORDPIECE if f"[{name.upper()}]" in pieces
    } | special
    missing = [name for name in ("unk_token", "cls_token", "sep_token") if name not in special]
    if missing:
        raise ProcessFatal(f"{path}: tokenizer 'bert' has no {missing[0]}; give one with --tokenizer")
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.WordPiece(vocab=vocabulary, unk_token=special["unk_token"], max_input_chars_per_word=100)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece, kind in zip(pieces, types) if kind == _CONTROL]
    )
    begin, end = special["cls_token"], special["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(begin, vocabulary[begin]), (end, vocabulary[end])],
    )
    return _describe(tokenizer, special)


def _merges_of(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Of a file that stores none: a pair merges if the result is a token, better scores first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_bos_and_eos(tokenizer: Tokenizer, fields: dict[str, Any], tokens: list[str], *, default_bos: bool) -> None:
    """Add the tokens that a prompt begins or ends with."""
    pieces, ids = [_BOS_POSITION], []
    for name, default, at in (("bos", default_bos, 0), ("eos", False, len(pieces))):
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        if fields.get(f"tokenizer.ggml.add_{name}_token", default) and index is not None:
            pieces.insert(at if name == "bos" else len(pieces), tokens[index])
            ids.append((tokens[index], index))
    if ids:
        tokenizer.post_processor = processors.TemplateProcessing(single=" ".join(pieces), special_tokens=ids)


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
