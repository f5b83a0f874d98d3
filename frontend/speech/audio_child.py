"""Decodes one audio file in a process that may die of it. `make` runs once in the fork server of audio_decoder.py."""

import contextlib

import msgspec

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.speech import audio_files
from meshlm.frontend.speech.audio_decoder import DECODED, REFUSED
from meshlm.runtime.sandbox.fork_server import Handle, answering


def make(argument: bytes) -> Handle:
    """argument: the most seconds that a file may hold, as JSON."""
    max_seconds = msgspec.json.decode(argument, type=float)
    with contextlib.suppress(ImportError):  # the answers say so
        import av  # noqa: F401

    def decoded(data: bytes) -> bytes:
        try:
            return DECODED + audio_files.decode(data, max_seconds).tobytes()
        except HttpError as error:
            return REFUSED + msgspec.msgpack.encode((error.status, error.message, error.param, error.kind))

    return answering(decoded)
