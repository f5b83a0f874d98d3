"""How llama.cpp splits a text before byte-pair merges, by the name that a .gguf file gives it (`tokenizer.ggml.pre`).

Called by gguf_tokenizer.py and, to refuse a name that llama.cpp does not know, by the supervisor. A text is split by the first
pattern, what comes of it by the next, and so on; what a pattern leaves out stays a piece of its own. The patterns are for Oniguruma
(the tokenizers library's), and their cuts are llama.cpp's (tests/runtime/model_files/test_llama_cpp.py), which in places are coarser
than those of a model's tokenizer.json: llama.cpp knows no case of letters beyond ASCII.
"""

from typing import NamedTuple

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LAST_SPACE = r"\s+(?!\S)|\s+"  # before a word one space stays with it
_SPACES = rf"\s*[\r\n]+|{_LAST_SPACE}"
_LEAD = r"[^\r\n\p{L}\p{N}]?"  # what may stand before a word

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_LAST_SPACE}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = rf"{_CONTRACTIONS}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_CASCADE = "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
_JAIS2 = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|{_CASCADE}|\s"


def _cased(letters: str, behind: str, digits: str) -> str:
    """Words of capital, then of small letters. behind: what may follow a word."""
    upper, lower = f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    words = rf"{_LEAD}{upper}*{lower}+{behind}|{_LEAD}{upper}+{lower}*{behind}"
    return rf"{words}|{digits}|{_SYMBOLS_AND_SLASHES}|{_SPACES}"


_TEKKEN = _cased(r"\p{L}", "", r"\p{N}")
_GPT4O = _cased(r"\p{L}", f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_GRANITE_EMBEDDING = _cased(r"\p{L}\p{M}", f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_MARKED_WORDS = rf"{_LEAD}[\p{{L}}\p{{M}}]+{_CONTRACTIONS}?"

_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_ASCII_SYMBOL = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_CODE_WORDS = rf"{_ASCII_SYMBOL}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, rf"{_CODE_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")
_SPARK = (r"\p{N}{1,3}", _CJK, rf"{_CODE_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_LAST_SPACE}", r"\p{N}")
_EAST = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
# Threes of digits counted from the last. A run of digits is a piece first, so that it is counted once and not for each group of it; the
# text before a run stays with its first group, and is split by the patterns that follow.
_AFMOE_DIGITS = (r"\P{N}*+\p{N}++|\P{N}++", r"\A\P{N}*+\p{N}{1,2}(?=(?:\p{N}{3})*+\z)|\A\P{N}*+\p{N}{3}|\p{N}{3}")
_AFMOE = (*_AFMOE_DIGITS, _EAST, rf"{_CODE_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")
_LATIN = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_CJK = r"[[一-龥ࠀ-一가-퟿]&&[^\s]]+"  # in llama.cpp other spaces than ASCII's are no characters of a range
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_LATIN}]+", r"\s?[!-/:-~！-／：-～‘-‟、-。]+", r"\s+\z", _DEEPSEEK_CJK, r"\p{N}+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
_HAN = (
    "一-鿿㐀-䶿\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f\U0002b820-\U0002ceaf"
    "\U0002ceb0-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
)
_KIMI = rf"[{_HAN}]+|{_LEAD}[\p{{L}}&&[^{_HAN}]]+{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    rf"{_MARKED_WORDS}|\p{{N}}|{_SYMBOLS_AND_SLASHES}|{_SPACES}",
)
# Likewise, of ASCII's digits, and what follows a run of them in another script stays with its last group.
_FROM_THE_RIGHT = (r"[0-9]++(?:(?![0-9])\p{N})*+", r"\A[0-9]{1,2}(?=(?:[0-9]{3})++(?![0-9]))|[0-9]{3}(?=[0-9])")
_TINY_AYA = (*_AFMOE_DIGITS, rf"{_MARKED_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SLASHES}|{_SPACES}")
_K2_HORIZON = rf"{_CONTRACTIONS}|{_LEAD}[\p{{L}}\p{{M}}\u200c\u200d]+|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_LEAD}\p{{L}}+|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|{_LAST_SPACE}"
_SEED = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_UFAKZEKA = rf"{_LEAD}\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_SPACED = r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_EXAONE_MOE = rf"{_CONTRACTIONS}|{_LEAD}{_SPACED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_LAST_SPACE}"
_MINICPM5 = (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}+|{_SYMBOLS}|{_SPACES}")
_CHAMELEON = ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2)
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_LINES = "[^\n]+|\n+"
_LOW_LINE_WORDS = "▁[^▁\n]*|[^▁\n]+|\n+"


class PreTokenizer(NamedTuple):
    """What a name stands for."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is that token, whatever merges make of it
    add_bos: bool = False  # where the file does not say
    bytes_as_text: bool = True  # pieces are merged as GPT-2's stand-ins for bytes, not as characters
    low_lines: bool = False  # a space is written as the low line "▁"
    begins_with_space: bool = False  # a line that does not begin with a space gets one
    nfc: bool = False  # as the models' own tokenizer.json says; llama.cpp does not compose characters
    strips_mask: bool = False  # <mask> takes the spaces before it


def _named() -> dict[str, PreTokenizer]:
    digits = PreTokenizer((r"\p{N}", _GPT2))
    gpt2, llama3, qwen2 = PreTokenizer((_GPT2,)), PreTokenizer((_LLAMA3,)), PreTokenizer((_QWEN2,))
    metas = llama3._replace(ignore_merges=True, add_bos=True)
    deepseek3, gpt4o, bloom = PreTokenizer(_DEEPSEEK3), PreTokenizer((_GPT4O,)), PreTokenizer((_BLOOM,))
    characters = PreTokenizer((_LINES,), bytes_as_text=False, low_lines=True)
    of_names = {
        "": PreTokenizer(_DEFAULT),
        "default": PreTokenizer(_DEFAULT),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": metas,
        "dbrx smaug-bpe glm4 glm5 chatglm-bpe": llama3,
        "k2-horizon": PreTokenizer((_K2_HORIZON,)),
        "jais-2": PreTokenizer((_JAIS2,)),
        "minicpm5": PreTokenizer(_MINICPM5, ignore_merges=True),
        "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
        "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4": deepseek3,
        "spark2_5": PreTokenizer(_SPARK),
        "youtu": PreTokenizer(_YOUTU, ignore_merges=True),
        "falcon": PreTokenizer(_FALCON),
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": digits,
        "gpt-2 phi-2 jina-es jina-de gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling": gpt2,
        "exaone4 jina-v1-en roberta-bpe": gpt2,
        "jina-v2-es jina-v2-de jina-v2-code": gpt2._replace(strips_mask=True),
        "qwen2 deepseek-r1-qwen": qwen2._replace(nfc=True),
        "kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": qwen2,
        "qwen35": PreTokenizer((_QWEN35,), nfc=True),
        "poro-chat bloom gpt3-finnish": bloom,
        "viking": PreTokenizer((_BLOOM, r"\p{N}")),
        "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
        "chameleon": PreTokenizer(_CHAMELEON, add_bos=True),
        "gpt-4o llama4 kanana2 talkie minimax-m2": gpt4o,
        "granite-embed-multi-97m": PreTokenizer((_GRANITE_EMBEDDING,), ignore_merges=True),
        "tiny_aya cohere2moe": PreTokenizer(_TINY_AYA),
        "superbpe": PreTokenizer((r"\p{N}+", *_FROM_THE_RIGHT)),
        "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_BAILING,)),
        "seed-coder": PreTokenizer((_SEED,)),
        "ufakzeka": PreTokenizer((_UFAKZEKA,)),
        "kimi-k2": PreTokenizer((_KIMI,)),
        "afmoe": PreTokenizer(_AFMOE),
        "laguna": PreTokenizer((_LINES, _QWEN2)),
        "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
        "gemma4 granite-embed-multi-311m": characters._replace(add_bos=True),
        "sarvam-moe": characters,
        "mmbert": characters._replace(patterns=(_LOW_LINE_WORDS,), begins_with_space=True),
    }
    return {name: pre for names, pre in of_names.items() for name in (names.split() or [""])}


PRE_TOKENIZERS = _named()
