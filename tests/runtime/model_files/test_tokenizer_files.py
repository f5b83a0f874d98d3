"""Tokenizers of synthesised folders against transformers' AutoTokenizer: the same ids and the same text."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.runtime.model_files.tokenizer_config import eos_token_id
from meshlm.runtime.model_files.tokenizer_files import load

CORPUS = ["hello world there tool don't you leading"] * 3
TEXTS = [
    "Hello  world",
    "<s>hi</s> there",
    " leading",
    "don't  you ?",
    "é你好",
    "<tool> x </tool>",
    "hello a <b> <end>",
]
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama 2's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, special_tokens=tokens, show_progress=False)
    )
    return tokenizer


def begun(tokenizer: Tokenizer) -> Tokenizer:
    """Prompts begin with <s>."""
    index = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", index)])
    return tokenizer


def trained(tokenizer: Tokenizer) -> Tokenizer:
    """A trainer's own settings are left in the file."""
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    return tokenizer


def token(content: str, **changes: bool) -> dict[str, Any]:
    form = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **form, **changes}


DECODER = {"0": token("<s>", special=True), "1": token("</s>", special=True), "2": token("<pad>", special=True)}
CASES: dict[str, tuple[Tokenizer, dict[str, object]]] = {
    "plain": (byte_level(), {"tokenizer_config.json": {**FAST, **ENDS}}),
    "nothing beside": (byte_level(), {}),
    "bos": (begun(byte_level()), {"tokenizer_config.json": {**FAST, **ENDS}}),
    "add_bos_token says what the file does not": (
        byte_level(),
        {"tokenizer_config.json": {**FAST, **ENDS, "add_bos_token": True, "add_eos_token": True}},
    ),
    "no add_bos_token": (begun(byte_level()), {"tokenizer_config.json": {**FAST, **ENDS, "add_bos_token": False}}),
    # A LlamaTokenizer of transformers 5 is made anew of the vocabulary; what the tokenizer.json says is what is read here.
    "sentencepiece": (
        begun(sentencepiece()),
        {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **ENDS, "legacy": True}},
    ),
    "qwen": (byte_level(), {"tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>"}}),
    "added_tokens_decoder": (
        byte_level(),
        {"tokenizer_config.json": {**FAST, **ENDS, "added_tokens_decoder": {**DECODER, "290": token("<tool>")}}},
    ),
    "added in another form": (
        byte_level(),
        {"tokenizer_config.json": {**FAST, "added_tokens_decoder": {"1": token("</s>", special=True, rstrip=True)}}},
    ),
    "additional_special_tokens": (
        byte_level(),
        {"tokenizer_config.json": {**FAST, **ENDS, "additional_special_tokens": ["<tool>", "hello"]}},
    ),
    "extra_special_tokens": (byte_level(), {"tokenizer_config.json": {**FAST, "extra_special_tokens": ["<tool>"]}}),
    "special tokens without ids": (byte_level(), {"tokenizer_config.json": {**FAST, "eos_token": "<end>"}}),
    "special_tokens_map": (
        byte_level(),
        {"tokenizer_config.json": FAST, "special_tokens_map.json": {"bos_token": "<s>", "eos_token": token("</s>")}},
    ),
    "added_tokens.json": (
        byte_level(),
        {"tokenizer_config.json": {**FAST, "eos_token": "<end>"}, "added_tokens.json": {"<tool>": 290, "<end>": 291}},
    ),
    "split_special_tokens": (byte_level(), {"tokenizer_config.json": {**FAST, **ENDS, "split_special_tokens": True}}),
    "truncation and padding": (
        trained(byte_level()),
        {"tokenizer_config.json": {**FAST, **ENDS, "pad_token": "<pad>"}},
    ),
    "sides and lengths": (
        byte_level(),
        {
            "tokenizer_config.json": {
                **FAST,
                **ENDS,
                "truncation_side": "right",
                "padding_side": "left",
                "model_max_length": 3,
            }
        },
    ),
    "clean_up_tokenization_spaces": (
        byte_level(),
        {"tokenizer_config.json": {**FAST, **ENDS, "clean_up_tokenization_spaces": False}},
    ),
}


def written(folder: Path, tokenizer: Tokenizer, files: dict[str, object]) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {"config.json": {"model_type": "llama"}, **files}.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_transformers(case: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = written(tmp_path, *CASES[case])
    theirs, ours = AutoTokenizer.from_pretrained(folder), load(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.tokenizer.encode(text, add_special_tokens=special).ids == ids
            assert ours.tokenizer.decode(ids, skip_special_tokens=special) == theirs.decode(
                ids, skip_special_tokens=special
            )
    named = {name: text for name, text in theirs.special_tokens_map.items() if isinstance(text, str)}
    assert ours.special_tokens.items() <= named.items()
    if theirs.eos_token in byte_level().get_vocab() and case != "nothing beside":
        assert eos_token_id(folder) == theirs.eos_token_id


def test_a_tokenizers_end_that_only_the_vocabulary_knows(tmp_path: Path) -> None:
    folder = written(tmp_path, byte_level(), {"tokenizer_config.json": {"eos_token": "hello"}})
    assert eos_token_id(folder) == eos_token_id(folder / "tokenizer.json") == byte_level().token_to_id("hello")


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config.json": {
                "eos_token": "<end>",
                "added_tokens_decoder": {"400": token("<end>", special=True)},
            }
        },
        {"tokenizer_config.json": {"eos_token": "<end>"}, "added_tokens.json": {"<tool>": 290, "<end>": 291}},
        {"special_tokens_map.json": {"eos_token": "<end>"}, "added_tokens.json": {"<end>": 290}},
        {"tokenizer_config.json": {"eos_token": "<end>"}},
    ],
)
def test_an_end_that_another_file_adds_has_one_id(files: dict[str, object], tmp_path: Path) -> None:
    """The supervisor's is the one that texts are encoded with, and transformers'."""
    from transformers import AutoTokenizer

    fast = {**FAST, **files.get("tokenizer_config.json", {})}  # type: ignore[dict-item]
    folder = written(tmp_path, byte_level(), {**files, "tokenizer_config.json": fast})
    theirs = AutoTokenizer.from_pretrained(folder).eos_token_id
    assert eos_token_id(folder) == load(folder).tokenizer.encode("<end>").ids[0] == theirs


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"eos_token": 5}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": "a"}}'),
        ("special_tokens_map.json", '{"bos_token": {"text": "<s>"}}'),
        ("added_tokens.json", '{"<tool>": "x"}'),
    ],
)
def test_what_is_wrong_beside_the_tokenizer_is_one_line(name: str, content: str, tmp_path: Path) -> None:
    folder = written(tmp_path, byte_level(), {})
    (folder / name).write_text(content)
    for read, error in ((load, ProcessFatal), (eos_token_id, ModelFilesError)):
        with pytest.raises(error, match=name) as told:
            read(folder)
        assert "\n" not in str(told.value)


def test_gemma_4_in_a_gguf_file(tmp_path: Path) -> None:
    """Its merges are stored; spaces are characters, and no prompt begins with one."""
    import gguf
    from transformers import GemmaTokenizer

    trainee = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trainee.normalizer = normalizers.Replace(" ", "▁")
    tokens = ["<pad>", "</s>", "<s>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), "<tool>"]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=tokens, show_progress=False)
    trainee.train_from_iterator(CORPUS, trainer)
    model = json.loads(trainee.to_str())["model"]
    theirs = GemmaTokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        **{**ENDS, "extra_special_tokens": ["<tool>"]},
    )
    writer, path = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma4"), tmp_path / "m.gguf"
    names = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(names)
    writer.add_token_types([3 if nth in (0, 1, 2) else 4 if name == "<tool>" else 1 for nth, name in enumerate(names)])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    for name, number in (("unk", 3), ("bos", 2), ("eos", 1)):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    ours = load(path)
    assert len(model["merges"]) > 20
    for text in [*TEXTS, "two  words\n\nand  more ", "▁"]:
        ids = ours.tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.tokenizer.encode(text).ids == [2, *ids]
        assert ours.tokenizer.decode(ids, skip_special_tokens=False) == theirs.decode(
            ids, clean_up_tokenization_spaces=False
        )


WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cafe",
    "##s",
    "un",
    "##aff",
    "##able",
    ",",
    "!",
    "東",
    "a",
    "##a",
]


def bert_gguf(tmp_path: Path, words: list[str]) -> Path:
    """The vocabulary as llama.cpp writes it: words have a mark, and what goes on with one has none."""
    import gguf

    writer, path = gguf.GGUFWriter(tmp_path / "m.gguf", "bert"), tmp_path / "m.gguf"
    writer.add_tokenizer_model("bert")
    marked = [word if word[0] == "[" else word[2:] if word.startswith("##") else f"▁{word}" for word in words]
    writer.add_token_list(marked)
    writer.add_token_types([3 if word[0] == "[" else 1 for word in words])
    for name in ("unk", "sep", "pad", "mask"):
        if f"[{name.upper()}]" in words:
            getattr(writer, f"add_{name}_token_id")(words.index(f"[{name.upper()}]"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_bert_in_a_gguf_file(tmp_path: Path) -> None:
    """Small letters without accents, each Chinese character a word, and an unknown word as one token."""
    from transformers import BertTokenizer

    theirs = BertTokenizer(vocab={word: nth for nth, word in enumerate(WORDS)})
    ours = load(bert_gguf(tmp_path, WORDS))
    for text in ("The cafés, unaffable!", "東京 the\u00a0 CAFE", "", "[SEP] aa a\taa", "unaffables zzz\x00the"):
        assert ours.tokenizer.encode(text).ids == theirs.encode(text), text
    both = ours.tokenizer.encode("the", "cafes")
    assert (both.ids, both.type_ids) == ([2, 5, 3, 6, 7, 3], [0, 0, 0, 1, 1, 1])
    assert ours.special_tokens["cls_token"] == "[CLS]"
    assert ours.tokenizer.decode([2, 8, 9, 10, 11, 5, 3]) == "unaffable, the"


def test_bert_in_a_gguf_file_without_an_end(tmp_path: Path) -> None:
    with pytest.raises(ProcessFatal, match="tokenizer 'bert' has no sep_token"):
        load(bert_gguf(tmp_path, [word for word in WORDS if word != "[SEP]"]))
