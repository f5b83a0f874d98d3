"""How much the open requests of this frontend may take: bytes, and questions to the tokenizer; and what keys may ask for in a minute.
Owned by io.py.

A request is counted before anything is made of it: its prompts for the frontend and, times their choices, for the processes behind it,
and what each sequence takes beside its tokens. It counts until it is closed.
"""

import hashlib
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.responses import Response
from meshlm.protocol.edges.text import Detokenize, DetokenizeReply, Prompt, Tokenize, TokenizeReply, num_bytes_of
from meshlm.protocol.extras import num_bytes
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime import bad_words
from meshlm.runtime.api_keys import ApiKey, Limits

_RECORD = struct.Struct("ddd")  # requests and tokens that are left, and when that was
MINUTE_S = 60.0
SEQUENCE_BYTES = 16 << 10  # of one sequence in all processes, without its prompt
# Of an id in a list, of an entry of logit_bias, in the process that has one for each sequence.
ID_BYTES, BIAS_BYTES = 40, 120
EXTRA_COPIES = 3  # of a sequence's extras, as they are in messages and in the processes that have the sequence
MAX_QUESTIONS = 256  # open /tokenize and /detokenize requests
MAX_QUESTION_BYTES = 32 << 20  # of all of them


def cost_of(parsed_request: ParsedRequest) -> int:
    """Bytes that a generation request takes, about."""
    mesh = parsed_request.mesh
    ids = mesh.sampling
    num_ids = len(ids.stop_token_ids) + len(ids.allowed_token_ids) + bad_words.num_ids(mesh.text.bad_words)
    listed = ID_BYTES * num_ids + BIAS_BYTES * len(ids.logit_bias) + EXTRA_COPIES * num_bytes(mesh.extras)
    num_sequences = len(mesh.prompts) * mesh.num_choices
    return sum(map(num_bytes_of, mesh.prompts)) * (1 + mesh.num_choices) + num_sequences * (SEQUENCE_BYTES + listed)


class Budget:
    """What the open requests of one frontend take. `max_bytes` is --max-concurrent-bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_questions = self.question_bytes = 0

    def open(self, parsed_request: ParsedRequest) -> int:
        """Let a request in, whose cost is to be given to `close`. HttpError: 400 if it is too large for any time, 503 for now."""
        cost = cost_of(parsed_request)
        if cost > self.max_bytes:
            text = (
                f"this request's prompts, times their choices, take about {cost} bytes; one request may take "
                f"{self.max_bytes} (--max-concurrent-bytes)"
            )
            mesh = parsed_request.mesh
            raise HttpError(400, text, "prompt" if len(mesh.prompts) > 1 or mesh.num_choices == 1 else "n")
        if self.num_bytes + cost > self.max_bytes:
            text = "open requests take all bytes that they may (--max-concurrent-bytes)"
            raise HttpError.of_kind(ErrorKind.OVERLOADED, text)
        self.num_bytes += cost
        return cost

    def close(self, cost: int) -> None:
        self.num_bytes -= cost

    def open_question(self, asked: Prompt | bytes) -> int:
        """Let a question to the tokenizer in, whose size is to be given to `close_question`. HttpError."""
        size = len(asked) if isinstance(asked, bytes) else num_bytes_of(asked)
        has_room = not self.num_questions or self.question_bytes + size <= MAX_QUESTION_BYTES
        if self.num_questions >= MAX_QUESTIONS or not has_room:
            raise HttpError.of_kind(ErrorKind.OVERLOADED, "too many texts wait to be tokenized; try again")
        self.num_questions += 1
        self.question_bytes += size
        return size

    def close_question(self, size: int) -> None:
        self.num_questions -= 1
        self.question_bytes -= size


class _Levels(NamedTuple):
    requests: float
    tokens: float
    at: float


def num_tokens(question: Tokenize | Detokenize, reply: TokenizeReply | DetokenizeReply) -> int:
    """The tokens that the tokenizer made, or read."""
    if isinstance(reply, TokenizeReply):
        return len(reply.token_ids) // 4
    return len(question.token_ids) // 4 if isinstance(question, Detokenize) else 0


class RateLimits:
    """How much a key may ask for in a minute: requests, and tokens of prompts and answers. Both listeners ask it.

    Only keys of --api-key-file with `rpm=` or `tpm=` have limits. A level is a bucket that a minute fills: requests are taken out as
    they come, also those for the tokenizer alone, tokens when an answer has ended, since nobody knows before how many there are; a
    key whose tokens are below zero waits. The levels of a key are one small file in the run directory, so that all frontends count
    together and a frontend that dies forgets nothing. Two frontends that take from one key in the same microseconds may count it
    once. The clock must be one for all processes of the host, as the monotonic one is.
    """

    def __init__(self, run_dir: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = Path(run_dir) / "rates", clock
        self._limits: dict[str, Limits] = {}  # of the keys that have asked

    def take(self, key: ApiKey) -> float:
        """Counts one request of this key, or gives the seconds after which it would be let in."""
        limits = key.limits
        if limits is None:
            return 0.0
        name = key.key.decode()
        self._limits[name] = limits
        levels = self._read(name, limits)
        waits = 0.0
        if limits.rpm and levels.requests < 1:
            waits = (1 - levels.requests) * MINUTE_S / limits.rpm
        if limits.tpm and levels.tokens <= 0:
            waits = max(waits, (1 - levels.tokens) * MINUTE_S / limits.tpm)
        if waits == 0.0:
            self._write(name, levels._replace(requests=levels.requests - 1))
        return waits

    def ended(self, answer: Response) -> None:
        """Counts the tokens of an answer for the key that asked for it."""
        if answer.parsed_request.api_key in self._limits:
            usage = answer.usage()
            self.used(answer.parsed_request.api_key, usage["prompt_tokens"] + usage["completion_tokens"])

    def used(self, name: str, num_tokens: int) -> None:
        """An answer for this key has ended that took so many tokens."""
        limits = self._limits.get(name)
        if limits is not None and limits.tpm and num_tokens:
            levels = self._read(name, limits)
            self._write(name, levels._replace(tokens=levels.tokens - num_tokens))

    def _read(self, name: str, limits: Limits) -> _Levels:
        """The levels of now. A limit that was changed holds from here on."""
        now = self._clock()
        try:
            before = _Levels(*_RECORD.unpack(self._path(name).read_bytes()))
        except (OSError, struct.error):
            return _Levels(limits.rpm, limits.tpm, now)
        minutes = max(0.0, now - before.at) / MINUTE_S
        return _Levels(
            min(limits.rpm, before.requests + minutes * limits.rpm),
            min(limits.tpm, before.tokens + minutes * limits.tpm),
            now,
        )

    def _write(self, name: str, levels: _Levels) -> None:
        path = self._path(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        try:
            file = os.open(path, flags, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            file = os.open(path, flags, 0o600)
        try:
            os.pwrite(file, _RECORD.pack(*levels), 0)
        finally:
            os.close(file)

    def _path(self, name: str) -> Path:
        return self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]
