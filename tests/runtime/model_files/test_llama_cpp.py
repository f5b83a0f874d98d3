"""Tokenizers of .gguf files against llama.cpp itself: the same tokens, begins and ends, however a file says that texts are split."""

import json
import os
import struct
import subprocess
import sys
import time
import unicodedata
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gguf
import pytest
from model_folders import resolve_model
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.runtime.model_files.gguf_pre_tokenizers import PRE_TOKENIZERS
from meshlm.runtime.model_files.gguf_vocabulary import ends_of_text, read
from meshlm.runtime.model_files.tokenizer_files import load, token_bytes

LLAMA_CPP = Path(sys.prefix) / "xllamacpp-2026.10.11549"  # beside the packages of the virtual environment (Makefile)
SUPPORT = Path(__file__).parents[1] / "support"
TEXTS = [
    "",
    " ",
    "Hello world",
    "  Hello   world  ",
    "\n\n\nfoo\n bar \r\n\r\n baz\n\n",
    "\t\ttabs\tand  \t spaces \n \t\n",
    "a\n \n  \n\n   b" + " " * 37 + "c" + " " * 20,
    "I'm you're WE'LL they'Ve don't DON'T it's IT'S he'd 'tis rock'n'roll l'été",
    "1 12 123 1234 12345 123456 1234567 12,345.67 0x1F 3.14e-10 2024-11-28 a1b22c333d4444",
    "١٢٣٤٥ Ⅻ ½ ²³ ①② 一二三 ๑๒๓",
    "CamelCase camelCase HTTPServer XMLHttpRequest ÉCOLE École éÉ straße ǅ",
    '!!! ??? ... -- ~~ `code` $5 <a href="x">&amp;</a> {}[]()|^+=*/\\ #tag @me a_b_c //comment\n/* x */\n',
    'print("hi")\n\tif x==1:\n\t\treturn [y for y in z]  # ok\n',
    "你好，世界。今天天气很好！漢字かな交じり文、カタカナ。「引用」〜ﾊﾝｶｸ",
    "안녕하세요 세계 ㄱㄴ 각",
    "Привет, мир! Ёлка ЁЛКА щи",
    "مرحبا بالعالم، كيف حالك؟ ۱۲۳۔",
    "नमस्ते दुनिया। ক্ষমা తెలుగు ไทยภาษา ລາວ ខ្មែរ မြန်မာ",
    "e\u0301 a\u0308o\u0308 n\u0303 Vie\u0323\u0302t cafe\u0301s",
    "🙂 😀😃 👩‍👩‍👧‍👦 🇩🇪 ❤️ 🏳️‍🌈 ☃ ©®™ €£¥ ∑∫√ →⇒",
    "\u00a0nbsp\u2003em\u3000wide\u200bzero\ufeffbom\u2028line\u0085next\u202f.",
    "\x00\x01\x1f\x7f control \x0b\x0c",
    "\U0001d4d0\U00010400\U00010428 \ue000 \ufffd \U00020000\U0002a700",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <s>x</s> <unk> <pad> <tool> a<tool>b <0x0A>",
    "<sentinel:12> IMGIMGABCZ    four  two",
    "...........          ----------__________==========",
    "aaaa bbbb  AAAA BBBB aA Aa aAaA ABCabc abcABC",
    "“quoted” ‘single’ – — … • ¿qué? ¡sí! «guillemets»",
    "https://example.com/a/b?c=d&e=f#g user@example.org C:\\dir\\file.txt",
    "▁low▁line ▁ Ġbyte Ċ",
    "0" * 50 + " " + "7" * 31,
    "1456½ 12¾ 123⅓ 1234567² 1\n22\n333\n4444 a1b22c333d4444e55555f666666g",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
USER = ["<tool>"]


@cache
def trained(mapped: bool) -> tuple[list[str], list[str]]:
    """Tokens and merges of the texts themselves, across all that a splitting would cut: another cut gives other tokens.

    mapped: over GPT-2's stand-ins for bytes, or over characters, with a low line for a space and bytes where there is no token.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=not mapped))
    begin = [*SPECIAL, *USER, *(() if mapped else (f"<0x{byte:02X}>" for byte in range(256)))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if mapped else []
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False) if mapped else None
    if not mapped:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=4000, min_frequency=1, special_tokens=begin, initial_alphabet=alphabet, show_progress=False
    )
    known = TEXTS if mapped else [text for text in TEXTS if not set(text) & set("🙂😀नक𐐀\x00")]
    tokenizer.train_from_iterator(known, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), merges


class Case(NamedTuple):
    """A file: the model and pre of its tokenizer, further metadata, and tokens in the place of others."""

    kind: str = "gpt2"
    pre: str | None = "default"
    fields: Mapping[str, Any] = MappingProxyType({})
    texts: tuple[str, ...] = ()  # of tokens, in the place of the last ones
    name: str = "m"
    charsmap: Mapping[str, str] = MappingProxyType({})


def charsmap(replaced: Mapping[str, str]) -> bytes:
    """Texts and what stands for them, as SentencePiece has them: a double array, in which each node's children have a block of 256."""
    trie: dict[int, Any] = {}
    texts = b""
    for text, other in replaced.items():
        node = trie
        for byte in text.encode():
            node = node.setdefault(byte, {})
        node[0] = len(texts)
        texts += other.encode() + b"\0"
    units = [0] * 256

    def place(node: dict[int, Any], at: int, label: int) -> None:
        begin = len(units)
        units.extend([0] * 256)
        units[at] = label | (0 in node) << 8 | (at ^ begin) << 10
        for byte, inner in node.items():
            if byte:
                place(inner, begin ^ byte, byte)
            else:
                units[begin] = inner | 1 << 31

    place(trie, 0, 0)
    blob = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(blob)) + blob + texts


def write(path: Path, case: Case) -> Path:
    """The file of a vocabulary, and no weights."""
    tokens, merges = trained(case.kind == "gpt2" and (case.pre is None or PRE_TOKENIZERS[case.pre].bytes_as_text))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(case.name)
    writer.add_tokenizer_model(case.kind)
    if case.pre is not None:
        writer.add_tokenizer_pre(case.fields.get("pre", case.pre))
    types = [1] * len(tokens)
    types[: len(SPECIAL)] = [2] + [3] * (len(SPECIAL) - 1)
    types[len(SPECIAL)] = 4
    if tokens[len(SPECIAL) + 1].startswith("<0x") and case.kind != "t5":
        types[len(SPECIAL) + 1 : len(SPECIAL) + 257] = [6] * 256
    gone = set(tokens[len(tokens) - len(case.texts) :]) if case.texts else set()
    writer.add_token_list([*tokens[: len(tokens) - len(case.texts)], *case.texts])
    writer.add_token_types([*types[:-1], case.fields.get("last_type", types[-1])])
    if case.fields.get("without"):
        pass
    elif case.kind == "llama":
        writer.add_token_scores([0.0 if kind != 1 else -float(nth) for nth, kind in enumerate(types)])
    elif case.kind == "t5":
        writer.add_token_scores([0.0 if kind != 1 else -1 - nth / 500 for nth, kind in enumerate(types)])
        if case.charsmap:
            writer.add_precompiled_charsmap(charsmap(case.charsmap))
    else:
        writer.add_token_merges([merge for merge in merges if merge.replace(" ", "") not in gone])
    for key, value in {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **case.fields}.items():
        if key in ("pre", "last_type", "without"):
            continue
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    for add_size, size in (
        (writer.add_block_count, 1),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 4),
    ):
        add_size(size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def of_llama_cpp(files: list[Path]) -> list[dict[str, Any] | None]:
    """What llama.cpp makes of these files and TEXTS."""
    if not LLAMA_CPP.exists():
        pytest.skip(f"{LLAMA_CPP.name} is not there: `make test` fetches it")
    asked = json.dumps({"texts": TEXTS, "files": [str(file) for file in files]})
    done = subprocess.run(
        [sys.executable, "-P", str(SUPPORT / "llama_cpp_vocabulary.py")],
        env={**os.environ, "PYTHONPATH": str(LLAMA_CPP)},
        input=asked + "\n",
        capture_output=True,
        text=True,
        errors="replace",  # llama.cpp logs bytes
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any] | None] = json.loads(done.stdout.splitlines()[-1])
    return found


CASES = {name or "no pre": Case(pre=name or None) for name in PRE_TOKENIZERS}
CASES |= {
    "llama": Case("llama", "default"),
    "llama without a prefix": Case("llama", "default", {"add_space_prefix": False, "add_bos_token": False}),
    "gemma4": Case("gemma4", None),
    "t5": Case("t5", None),
    "t5 with a prefix": Case("t5", None, {"add_space_prefix": True, "add_bos_token": True}),
    "XLM-R": Case(
        "t5",
        None,
        {"add_space_prefix": True, "remove_extra_whitespaces": True, "add_bos_token": True, "add_eos_token": True},
        charsmap=dict.fromkeys("\t\n\r\u00a0\u2003\u3000\u0085", " ")
        | {"ﬁ": "fi", "e\u0301": "é", "Ａ": "A", "\u200b": ""},
    ),
    "T5 with BOS by key alone": Case("t5", None, {"add_eos_token": False}),
    "bos and eos": Case(fields={"add_bos_token": True, "add_eos_token": True}),
    "no bos": Case(pre="llama-bpe", fields={"add_bos_token": False}),
    "a space before": Case(pre="gpt-2", fields={"add_space_prefix": True}),
    "phi-3": Case("llama", "default", name="Phi-3 mini"),
    "ends by key": Case(fields={"eot_token_id": 5, "eom_token_id": 9, "fim_pad_token_id": 11}),
    "ends by text": Case(texts=("<|eot_id|>", "<end_of_turn>", "<|end_of_text|>", "<|eom_id|>", "[EOS]", "[e~[")),
    "harmony": Case(pre="gpt-4o", texts=("<|return|>", "<|call|>", "<|end|>")),
    "solar": Case(pre="solar-open", texts=("<|flush|>", "<|calls|>", "<|end|>")),
    "gemma 4's ends": Case("gemma4", None, texts=("<turn|>", "<|tool_response>", "<eos>")),
    "infill": Case(texts=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>", "<fim_suffix>")),
    "phi-4": Case(texts=("<|end|>",)),
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any] | None]]:
    """Each case's file, and what llama.cpp makes of it."""
    folder = tmp_path_factory.mktemp("gguf")
    files = [write(folder / f"{nth}.gguf", case) for nth, case in enumerate(CASES.values())]
    return dict(zip(CASES, zip(files, of_llama_cpp(files), strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_tokens_are_llama_cpps(name: str, compared: dict[str, tuple[Path, dict[str, Any] | None]]) -> None:
    path, theirs = compared[name]
    assert theirs is not None, "llama.cpp does not load it"
    ours, vocabulary = load(path), read(path)
    for nth, text in enumerate(TEXTS):
        if vocabulary.kind == "gpt2" and vocabulary.pre_tokenizer.nfc and unicodedata.normalize("NFC", text) != text:
            continue  # composed here, as the model's own tokenizer.json does
        for special, ids in ((False, theirs["plain"][nth]), (True, theirs["whole"][nth])):
            found = ours.tokenizer.encode(text, add_special_tokens=special)
            assert found.ids == ids, (text, found.tokens, [vocabulary.tokens[token] for token in ids])
    assert list(ends_of_text(vocabulary)) == theirs["ends"]


def test_no_text_takes_long_to_split() -> None:
    """Long runs of one kind: their cost grows with their length and not with its square."""
    runs = ("7", "a", "A", " ", "!", "aA", "\n ", "\u0301", "'")
    for pre in set(PRE_TOKENIZERS.values()):
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        split = pre_tokenizers.Sequence(steps).pre_tokenize_str
        for run in runs:
            begun = time.process_time()
            split(run * 20_000)
            assert time.process_time() - begun < 1, (pre, run)


def test_pieces(compared: dict[str, tuple[Path, dict[str, Any] | None]]) -> None:
    for name in ("gpt-2", "llama", "gemma4"):
        path, theirs = compared[name]
        assert theirs is not None
        ours = load(path)
        for token, (data, piece) in enumerate(zip(token_bytes(ours), theirs["pieces"], strict=True)):
            if token not in theirs["control"] and token not in ours.special_ids:
                assert data.hex() == piece, token


def test_the_default_model(smollm2: Path) -> None:
    """A whole vocabulary."""
    (theirs,) = of_llama_cpp([smollm2])
    assert theirs is not None
    ours = load(smollm2).tokenizer
    assert [ours.encode(text).ids for text in TEXTS] == theirs["whole"]
    assert list(ends_of_text(read(smollm2, merges=False))) == theirs["ends"]


def test_words_in_pieces(minilm: Path, tmp_path: Path) -> None:
    """BERT's vocabulary, as llama.cpp writes it. Three texts are read as BERT reads them and llama.cpp does not: of a letter that is
    made of several it keeps the first alone, and marks without a width are no control characters there."""
    own = load(minilm).tokenizer
    pieces = own.get_vocab(with_added_tokens=True)
    words = sorted(pieces, key=pieces.__getitem__)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bert")
    writer.add_tokenizer_model("bert")
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    marked = [word if word in special else word[2:] if word.startswith("##") else f"▁{word}" for word in words]
    writer.add_token_list(marked)
    writer.add_token_types([3 if word in special else 1 for word in words])
    for key, name in (("bos", "CLS"), ("unknown", "UNK"), ("seperator", "SEP"), ("padding", "PAD"), ("mask", "MASK")):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", words.index(f"[{name}]"))
    for add_size, size in ((writer.add_block_count, 1), (writer.add_context_length, 64), (writer.add_head_count, 4)):
        add_size(size)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (theirs,) = of_llama_cpp([tmp_path / "m.gguf"])
    assert theirs is not None
    ours = load(tmp_path / "m.gguf").tokenizer
    assert [ours.encode(text).ids for text in TEXTS] == [own.encode(text).ids for text in TEXTS]
    other = {text for text, ids in zip(TEXTS, theirs["whole"], strict=True) if ours.encode(text).ids != ids}
    assert other == {text for text in TEXTS if set(text) & set("안ক\u200b")}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case(fields={"pre": "made-up"}), "tokenizer.ggml.pre 'made-up' is unknown"),
        (Case("llama", fields={"without": True}), "no tokenizer.ggml.scores there"),
        (Case("gemma4", fields={"without": True}), "no tokenizer.ggml.merges there"),
        (Case(fields={"without": True}), "no tokenizer.ggml.merges there"),
        (Case(fields={"add_eos_token": 1}), "metadata tokenizer.ggml.add_eos_token is 1, and must be true or false"),
        (Case("rwkv"), "tokenizer.ggml.model 'rwkv' is not supported"),
        (Case(fields={"last_type": 9}), "tokenizer.ggml.token_type 9 is unknown; known: 0 to 6"),
        (Case(fields={"eos_token_id": 99_999}), "tokenizer.ggml.eos_token_id is 99999; the tokens are 0 to"),
        (Case(texts=("<tool>",)), "tokenizer.ggml.tokens has '<tool>' twice"),
    ],
)
def test_what_is_unknown_is_refused_by_its_name(case: Case, said: str, tmp_path: Path) -> None:
    """By the supervisor, before any process loads it, and by whoever builds the tokenizer."""
    path = write(tmp_path / "m.gguf", case)
    with pytest.raises(ProcessFatal, match=said):
        load(path)
    with pytest.raises(ModelFilesError, match=said):
        resolve_model("", tokenizer=str(path))
