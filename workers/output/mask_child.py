"""A worker's matchers, in their process. `make` runs once in the fork server of mask_process.py, and loads the vocabulary.

Each child serves two sockets: its own, with turns of the stepper's, and one with grammars to compile, in a thread beside.
"""

import mmap
import os
import socket
import threading
from pathlib import Path

import msgspec
import numpy as np

from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.sandbox.fork_server import Handle
from meshlm.runtime.vocabulary import Vocabulary
from meshlm.workers.output.mask_process import SHARED_BYTES, SPIN_S, STACK_BYTES, MaskChild, comes, receive, send
from meshlm.workers.output.matchers import Matchers, Turn


def make(argument: bytes) -> Handle:
    model = msgspec.msgpack.decode(argument, type=MaskChild)
    vocabulary = Vocabulary(tokenizer_files.load(Path(model.tokenizer_path)), model.vocab_size, model.eos)

    def handle(turns: socket.socket, descriptors: list[int]) -> None:
        memory, compiles = descriptors
        os.environ["RUST_MIN_STACK"] = str(STACK_BYTES)  # of the library's threads, which it has none of yet
        threading.stack_size(STACK_BYTES)
        matchers = Matchers(lambda: vocabulary)
        connected = socket.socket(fileno=compiles)
        threading.Thread(target=_compile, args=(matchers, connected), daemon=True).start()
        words = np.frombuffer(mmap.mmap(memory, SHARED_BYTES), np.int32)
        while comes(turns, None, SPIN_S) and (message := receive(turns)) is not None:
            turn = msgspec.msgpack.decode(message, type=Turn)
            count = sum(turn.num_lines)
            masks = words[: count * vocabulary.num_words].reshape(count, vocabulary.num_words)
            send(turns, msgspec.msgpack.encode(matchers.turn(turn, masks)))

    return handle


def _compile(matchers: Matchers, connected: socket.socket) -> None:
    """Serves the socket of grammars."""
    while (text := receive(connected)) is not None:
        try:
            error = matchers.compile(text.decode("utf-8", "surrogatepass"))
        except BaseException as panic:  # the library's panics are no Exceptions; the client waits for an answer
            error = f"the grammar cannot be compiled: {panic}"
        send(connected, error.encode())
    os._exit(0)
