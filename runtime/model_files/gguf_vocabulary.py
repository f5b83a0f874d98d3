"""What a .gguf file says of its tokens: texts, types, which begin and end a text. The rules are llama.cpp's.

The supervisor asks for the ends and refuses what nobody can read; the detokenizer and the workers build a tokenizer of it
(gguf_tokenizer.py). Imports no tokenizers library.
"""

from pathlib import Path
from typing import Any

from msgspec import Struct

from meshlm.runtime.model_files.gguf_files import GGUFError, read_header
from meshlm.runtime.model_files.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_TYPES = frozenset((0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE))
KINDS = ("gpt2", "llama", "gemma4", "bert", "t5")
"""Values of tokenizer.ggml.model that are read."""
_KEYS = {
    **{name: f"{name}_token_id" for name in ["bos", "eos", "eot", "eom", "mask", "cls"]},
    **{f"fim_{name}": f"fim_{name}_token_id" for name in ["pre", "suf", "mid", "pad", "rep", "sep"]},
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # llama.cpp's spelling
    "pad": "padding_token_id",
}
_IDS = {"llama": {"unk": 0, "bos": 1, "eos": 2}, "t5": {"pad": 0, "eos": 1, "unk": 2}}  # where a file does not say
_MERGES = ("tokenizer.ggml.merges", "tokenizer.ggml.scores")
_FLAGS = (
    *("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces"),
    *("normalizer.lowercase", "normalizer.strip_accents"),
)
_NOT_APPLIED = ("tokenizer.ggml.suppress_tokens",)


def _texts_of(names: str) -> frozenset[str]:
    return frozenset(names.split())


_ENDS = _texts_of("""
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
    <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
""")
"""Texts of tokens that end an answer wherever a vocabulary has them."""
_INFILL = {
    name: _texts_of(texts)
    for name, texts in (
        ("fim_pre", "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>"),
        ("fim_suf", "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>"),
        ("fim_mid", "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>"),
        ("fim_pad", "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
        ("fim_rep", "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
        ("fim_sep", "<|file_sep|>"),
    )
}
"""Texts of tokens around code that is filled in, where no key names the token."""


class Vocabulary(Struct, frozen=True, kw_only=True):
    """The tokens of a file."""

    path: Path
    keys: frozenset[str]  # of the file, also of those that were not read
    fields: dict[str, Any]  # of "tokenizer.", and general.name
    kind: str
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]  # bos, eos, unk and the like

    @property
    def pre_tokenizer(self) -> PreTokenizer:
        """How a text is split before merges."""
        return PRE_TOKENIZERS["gemma4" if self.kind == "gemma4" else self.fields.get("tokenizer.ggml.pre", "")]

    @property
    def control(self) -> set[int]:
        """Tokens that are no text: those of that type, and those that llama.cpp knows by their texts."""
        infill = {text for name, texts in _INFILL.items() if name not in self.ids for text in texts}
        plain = "</s>" if "<|tool_response>" in self.tokens else None  # a piece of text in Gemma 4's
        texts = (_ENDS | infill) - {plain}
        return {
            index
            for index, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if text in texts or (kind in (CONTROL, UNKNOWN) and text != plain)
        }

    def flag(self, name: str, default: bool) -> bool:
        """A truth value of the file."""
        value = self.fields.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise GGUFError(f"{self.path}: metadata tokenizer.ggml.{name} is {value!r:.60}, and must be true or false")
        return value


def read(path: Path, *, merges: bool = True) -> Vocabulary:
    """The tokens of this file. GGUFError names what it says that cannot be. merges: with merges and scores, for which the supervisor
    has no use."""
    keys: set[str] = set()

    def wanted(name: str) -> bool:
        keys.add(name)
        return name == "general.name" or (name.startswith("tokenizer.") and (merges or name not in _MERGES))

    fields = read_header(path, wanted).fields
    kind = str(fields.get("tokenizer.ggml.model"))
    tokens = _texts(path, fields)
    types = fields.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise GGUFError(f"{path}: tokenizer.ggml.token_type is no list of {len(tokens)} types, one for each token")
    if unknown := [kind for kind in set(types) if kind not in _TYPES]:
        raise GGUFError(f"{path}: tokenizer.ggml.token_type {unknown[0]!r:.60} is unknown; known: 0 to {max(_TYPES)}")
    return Vocabulary(
        path=path,
        keys=frozenset(keys),
        fields=fields,
        kind=kind,
        tokens=tokens,
        types=types,
        ids=_ids(path, kind, fields, tokens),
    )


def check(vocabulary: Vocabulary) -> None:
    """GGUFError names what no tokenizer can be built of."""
    path, kind, pre = vocabulary.path, vocabulary.kind, vocabulary.fields.get("tokenizer.ggml.pre", "")
    if "tokenizer.ggml.model" not in vocabulary.keys:
        raise GGUFError(f"{path}: there is no tokenizer in it (tokenizer.ggml.model); give one with --tokenizer")
    if kind not in KINDS:
        raise GGUFError(
            f"{path}: tokenizer.ggml.model {kind!r:.60} is not supported ({', '.join(KINDS)}); give one with --tokenizer"
        )
    if kind == "gpt2" and (not isinstance(pre, str) or pre not in PRE_TOKENIZERS):
        raise GGUFError(
            f"{path}: tokenizer.ggml.pre {pre!r:.60} is unknown, and how texts are split decides their tokens; "
            f"known: {', '.join(sorted(filter(None, PRE_TOKENIZERS)))}; give a tokenizer with --tokenizer"
        )
    for name in _FLAGS:
        vocabulary.flag(name, False)
    needed = {"llama": "scores", "t5": "scores", "bert": "tokens"}.get(kind, "merges")
    if f"tokenizer.ggml.{needed}" not in vocabulary.keys and pre != "kimi-k2":  # which may have none
        raise GGUFError(f"{path}: no tokenizer.ggml.{needed} there; give a tokenizer with --tokenizer")
    if not vocabulary.tokens:
        raise GGUFError(f"{path}: no tokenizer.ggml.tokens there; give a tokenizer with --tokenizer")


def notes(vocabulary: Vocabulary) -> tuple[str, ...]:
    """What a user should know of this tokenizer."""
    found = [f"{vocabulary.path}: {name} is not applied" for name in _NOT_APPLIED if vocabulary.fields.get(name)]
    if vocabulary.kind == "gpt2" and not vocabulary.fields.get("tokenizer.ggml.pre"):
        found.append(
            f"{vocabulary.path}: no tokenizer.ggml.pre says how texts are split; as in llama.cpp it is a default, "
            "which may not be the model's (--tokenizer gives another)"
        )
    return tuple(found)


def ends_of_text(vocabulary: Vocabulary) -> tuple[int, ...]:
    """The tokens that end an answer, as llama.cpp finds them: by the file's keys, and by their texts."""
    ends = {index for name in ("eos", "eot", "eom") if (index := vocabulary.ids.get(name)) is not None}
    if vocabulary.kind == "bert":  # it writes nothing
        return tuple(sorted(ends))
    by_text = {text: index for index, text in enumerate(vocabulary.tokens) if text in _ENDS}
    ends |= set(by_text.values())
    for name in ("fim_pad", "fim_rep", "fim_sep"):
        index = vocabulary.ids.get(name)
        if index is None:
            index = next((index for index, text in enumerate(vocabulary.tokens) if text in _INFILL[name]), None)
        ends |= set() if index is None else {index}
    there = by_text.keys()
    harmony = "<|return|>" in there or "<|flush|>" in there
    if harmony and not there.isdisjoint(("<|call|>", "<|calls|>")):
        ends.discard(by_text.get("<|end|>", -1))  # it ends a message, and others follow
    if "<|tool_response>" in there:
        ends.discard(by_text.get("</s>", -1))  # Gemma 4's is no end
    return tuple(sorted(ends))


def _texts(path: Path, fields: dict[str, Any]) -> list[str]:
    tokens = fields.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or not all(isinstance(text, str) for text in tokens[:1]):
        raise GGUFError(f"{path}: tokenizer.ggml.tokens is no list of texts")
    named = [text or f"[EMPTY_{index}]" for index, text in enumerate(tokens)]
    if len(set(named)) != len(named):
        first: dict[str, int] = {}
        index, text = next((at, text) for at, text in enumerate(named) if first.setdefault(text, at) != at)
        raise GGUFError(f"{path}: tokenizer.ggml.tokens has {text!r:.60} twice ({first[text]}, {index})")
    return named


def _ids(path: Path, kind: str, fields: dict[str, Any], tokens: list[str]) -> dict[str, int]:
    found = {name: index for name, index in _IDS.get(kind, {}).items() if index < len(tokens)}
    for name, key in _KEYS.items():
        index = fields.get(f"tokenizer.ggml.{key}")
        if index is None:
            continue
        if type(index) is not int or (tokens and not 0 <= index < len(tokens)):
            raise GGUFError(f"{path}: tokenizer.ggml.{key} is {index!r:.60}; the tokens are 0 to {len(tokens) - 1}")
        found[name] = index
    return found
