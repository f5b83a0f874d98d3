"""A tokenizer built from a .gguf file, which gives the tokens that llama.cpp gives (tests/runtime/model_files/test_llama_cpp.py).

Called by tokenizer_files.py; what the file says is read by gguf_vocabulary.py.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from meshlm.runtime.model_files.gguf_files import UNREADABLE, GGUFError
from meshlm.runtime.model_files.gguf_vocabulary import CONTROL, USER_DEFINED, Vocabulary, check, read

_TEMPLATE_NAMES = ("bos", "eos", "unk", "pad")
_WORDPIECE_NAMES = ("cls", "sep", "unk", "pad", "mask")
_PHI3 = ("phi-3", "phi3")  # in general.name: its special tokens take the spaces behind them, but for these
_PHI3_KEEPS = frozenset(("<unk>", "<s>", "<|endoftext|>"))


def build(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a file, and the texts of its special tokens by name (bos_token). GGUFError says what cannot be read."""
    try:
        vocabulary = read(path)
        check(vocabulary)
        return _wordpiece(vocabulary) if vocabulary.kind == "bert" else _pieces(vocabulary)
    except (*UNREADABLE, LookupError) as error:
        raise GGUFError(f"{path}: not a readable tokenizer ({type(error).__name__}: {error})") from None


def _pieces(vocabulary: Vocabulary) -> tuple[Tokenizer, dict[str, str]]:
    """Of a vocabulary whose pieces are merged in pairs, or chosen by their likelihoods."""
    make = {"llama": _sentencepiece, "t5": _unigram}.get(vocabulary.kind, _merged)
    tokenizer = make(vocabulary)
    control = vocabulary.control
    user = {index for index, kind in enumerate(vocabulary.types) if kind == USER_DEFINED} - control
    strips = any(part in str(vocabulary.fields.get("general.name", "")).lower() for part in _PHI3)
    mask = vocabulary.kind == "gpt2" and vocabulary.pre_tokenizer.strips_mask

    def added(index: int, special: bool) -> AddedToken:
        text = vocabulary.tokens[index]
        rstrip, lstrip = strips and text not in _PHI3_KEEPS, mask and text == "<mask>"
        return AddedToken(text, special=special, normalized=False, rstrip=rstrip, lstrip=lstrip)

    tokenizer.add_special_tokens([added(index, True) for index in sorted(control)])
    tokenizer.add_tokens([added(index, False) for index in sorted(user)])
    _add_bos_and_eos(tokenizer, vocabulary)
    ids = vocabulary.ids
    return tokenizer, {f"{name}_token": vocabulary.tokens[ids[name]] for name in _TEMPLATE_NAMES if name in ids}


def _merged(vocabulary: Vocabulary) -> Tokenizer:
    """By the merges of the file: over GPT-2's stand-ins for bytes, or over characters with bytes for those that are no token."""
    pre = vocabulary.pre_tokenizer
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    pairs = vocabulary.fields.get("tokenizer.ggml.merges", [])
    # A space may begin what is merged.
    merges = [(text[: (at := text.index(" ", 1))], text[at + 1 :]) for text in pairs]
    unknown = vocabulary.ids.get("unk")
    try:
        tokenizer = Tokenizer(
            models.BPE(
                vocab=ids,
                merges=merges,
                ignore_merges=pre.ignore_merges,
                byte_fallback=not pre.bytes_as_text,
                unk_token=None if pre.bytes_as_text or unknown is None else vocabulary.tokens[unknown],
                fuse_unk=not pre.bytes_as_text,
            )
        )
    except Exception as error:  # tokenizers raises nothing narrower
        raise GGUFError(f"{vocabulary.path}: tokenizer.ggml.merges do not fit the tokens ({error})") from None
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    if pre.bytes_as_text:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.decoder = decoders.ByteLevel()
    else:
        low_line = [decoders.Replace("▁", " ")] if pre.low_lines else []
        tokenizer.decoder = decoders.Sequence([*low_line, decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.low_lines:
        changes: list[Any] = [normalizers.Replace(" ", "▁")]
        if pre.begins_with_space:
            changes.append(normalizers.Replace(Regex(r"(?:\A|(?<=\n))(?=[^\n▁])"), "▁"))
        tokenizer.normalizer = normalizers.Sequence(changes)
    elif pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """Llama 2's, over characters with bytes for those that are no token."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = _merges_of(ids, vocabulary.fields["tokenizer.ggml.scores"])
    unknown = vocabulary.tokens[vocabulary.ids["unk"]]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    decoding: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _unigram(vocabulary: Vocabulary) -> Tokenizer:
    """T5's and XLM-R's: the likeliest pieces of a text, in which characters are replaced and spaces joined first."""
    scores = [
        0.0 if kind == USER_DEFINED else float(score)
        for kind, score in zip(vocabulary.types, vocabulary.fields["tokenizer.ggml.scores"], strict=True)
    ]
    pieces = list(zip(vocabulary.tokens, scores, strict=True))
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=vocabulary.ids.get("unk"), byte_fallback=False))
    steps: list[Any] = []
    if charsmap := vocabulary.fields.get("tokenizer.ggml.precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(value & 255 for value in charsmap)))
    joins = vocabulary.flag("remove_extra_whitespaces", False)
    if joins:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" +"), " ")]
    if joins or vocabulary.flag("add_space_prefix", False):
        steps.append(normalizers.Replace(Regex(r"\A(?= *[^ ])"), " "))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return tokenizer


def _merges_of(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Of a file that stores none: a pair merges if the result is a token, better scores first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[index], ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_bos_and_eos(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Add the tokens that a prompt begins or ends with."""
    ends = vocabulary.flag("add_eos_token", vocabulary.kind == "t5")
    default = vocabulary.kind == "llama" or (vocabulary.kind != "t5" and vocabulary.pre_tokenizer.add_bos)
    begins = vocabulary.flag("add_bos_token", default)
    if vocabulary.kind == "gemma4":
        begins = True  # files say false by mistake, and llama.cpp goes by the model
    pieces, found = ["$A"], []
    for name, wanted in (("bos", begins), ("eos", ends)):
        index = vocabulary.ids.get(name)
        if wanted and index is None and f"tokenizer.ggml.add_{name}_token" in vocabulary.fields:
            where = f"{vocabulary.path}: tokenizer.ggml"
            raise GGUFError(f"{where}.add_{name}_token is true, and {name}_token_id is missing")
        if wanted and index is not None:
            pieces.insert(0 if name == "bos" else len(pieces), vocabulary.tokens[index])
            found.append((vocabulary.tokens[index], index))
    if found:
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=found)


def _wordpiece(vocabulary: Vocabulary) -> tuple[Tokenizer, dict[str, str]]:
    """BERT's, in small letters without accents, as llama.cpp reads texts. Its files mark words and not what goes on with one."""
    pieces = [
        text if kind == CONTROL else text[1:] if text.startswith("▁") else f"##{text}"
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    special = {f"{name}_token": f"[{name.upper()}]" for name in _WORDPIECE_NAMES if f"[{name.upper()}]" in pieces}
    special |= {f"{name}_token": pieces[vocabulary.ids[name]] for name in _WORDPIECE_NAMES if name in vocabulary.ids}
    missing = [name for name in ("unk_token", "cls_token", "sep_token") if name not in special]
    if missing:
        raise GGUFError(f"{vocabulary.path}: tokenizer 'bert' has no {missing[0]}; give one with --tokenizer")
    ids = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab=ids, unk_token=special["unk_token"], max_input_chars_per_word=100))
    lowercase = vocabulary.flag("normalizer.lowercase", True)
    strips = vocabulary.flag("normalizer.strip_accents", lowercase)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strips)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    control = [piece for piece, kind in zip(pieces, vocabulary.types) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    begin, end = special["cls_token"], special["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(begin, ids[begin]), (end, ids[end])],
    )
    return tokenizer, special
