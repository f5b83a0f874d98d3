"""llama.cpp's tokenizer, by its C functions in the library of the package xllamacpp; nothing of MeshLM is imported here.

A process of its own, since llama.cpp ends it where it meets what it did not expect. It reads one line of JSON,
{"texts": [...], "files": [...]}, and writes one: for each file an object, or null where llama.cpp does not load it.
"""

import ctypes
import json
import sys
from importlib.util import find_spec
from typing import Any

MOST = 100_000  # tokens of a text


class Params(ctypes.Structure):
    """llama_model_params of the pinned version; what stands around vocab_only is left as llama.cpp has it."""

    _fields_ = [("before", ctypes.c_ubyte * 72), ("vocab_only", ctypes.c_bool), ("behind", ctypes.c_ubyte * 23)]


def library() -> ctypes.CDLL:
    found = find_spec("xllamacpp.xllamacpp")
    assert found is not None
    assert found.origin is not None
    lib = ctypes.CDLL(found.origin)
    for name, result, arguments in (
        ("llama_model_default_params", Params, []),
        ("llama_model_load_from_file", ctypes.c_void_p, [ctypes.c_char_p, Params]),
        ("llama_model_free", None, [ctypes.c_void_p]),
        ("llama_model_get_vocab", ctypes.c_void_p, [ctypes.c_void_p]),
        ("llama_vocab_n_tokens", ctypes.c_int32, [ctypes.c_void_p]),
        ("llama_vocab_is_eog", ctypes.c_bool, [ctypes.c_void_p, ctypes.c_int32]),
        ("llama_vocab_is_control", ctypes.c_bool, [ctypes.c_void_p, ctypes.c_int32]),
        (
            "llama_token_to_piece",
            ctypes.c_int32,
            [ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_bool],
        ),
        (
            "llama_tokenize",
            ctypes.c_int32,
            [
                ctypes.c_void_p,
                ctypes.c_char_p,
                ctypes.c_int32,
                ctypes.POINTER(ctypes.c_int32),
                ctypes.c_int32,
                ctypes.c_bool,
                ctypes.c_bool,
            ],
        ),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def tokens(lib: ctypes.CDLL, vocab: int, text: str, special: bool) -> list[int]:
    """special: with what a prompt begins and ends with. Special tokens in the text are found always."""
    data, found = text.encode(), (ctypes.c_int32 * MOST)()
    count = lib.llama_tokenize(vocab, data, len(data), found, MOST, special, True)
    assert count >= 0
    return found[:count]


def piece(lib: ctypes.CDLL, vocab: int, token: int) -> str:
    """The bytes of a token, in hexadecimal digits."""
    found = ctypes.create_string_buffer(4096)
    count = lib.llama_token_to_piece(vocab, token, found, 4096, 0, False)
    assert count >= 0
    return found.raw[:count].hex()


def described(lib: ctypes.CDLL, path: str, texts: list[str]) -> dict[str, Any] | None:
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(path.encode(), params)
    if not model:
        return None
    vocab = lib.llama_model_get_vocab(model)
    every = range(lib.llama_vocab_n_tokens(vocab))
    found = {
        "plain": [tokens(lib, vocab, text, False) for text in texts],
        "whole": [tokens(lib, vocab, text, True) for text in texts],
        "ends": [token for token in every if lib.llama_vocab_is_eog(vocab, token)],
        "control": [token for token in every if lib.llama_vocab_is_control(vocab, token)],
        "pieces": [piece(lib, vocab, token) for token in every],
    }
    lib.llama_model_free(model)
    return found


def main() -> None:
    asked, lib = json.loads(sys.stdin.readline()), library()
    print(json.dumps([described(lib, path, asked["texts"]) for path in asked["files"]]))


if __name__ == "__main__":
    main()
