"""How much the open requests of this frontend may take: bytes, and questions to the tokenizer. Owned by io.py.

A request is counted before anything is made of it: its prompts for the frontend and, times their choices, for the processes behind it,
and what each sequence takes beside its tokens. It counts until it is closed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.protocol.edges.text import Detokenize, DetokenizeReply, Prompt, Tokenize, TokenizeReply, num_bytes_of
from meshlm.protocol.extras import num_bytes
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime import bad_words

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
    files = sum(len(source.data) for source in mesh.media) if mesh.media else 0
    return (
        files
        + sum(map(num_bytes_of, mesh.prompts)) * (1 + mesh.num_choices)
        + num_sequences * (SEQUENCE_BYTES + listed)
    )


class Budget:
    """What the open requests of one frontend take. `max_bytes` is --max-concurrent-bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_questions = self.question_bytes = 0

    @contextmanager
    def open(self, parsed_request: ParsedRequest) -> Iterator[None]:
        """Lets a request in, which counts until it is over. HttpError: 400 if it is too large for any time, 503 for now."""
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
        try:
            yield
        finally:
            self.num_bytes -= cost

    @contextmanager
    def open_question(self, asked: Prompt | bytes) -> Iterator[None]:
        """Lets a question to the tokenizer in, which counts until it is answered. HttpError."""
        size = len(asked) if isinstance(asked, bytes) else num_bytes_of(asked)
        has_room = not self.num_questions or self.question_bytes + size <= MAX_QUESTION_BYTES
        if self.num_questions >= MAX_QUESTIONS or not has_room:
            raise HttpError.of_kind(ErrorKind.OVERLOADED, "too many texts wait to be tokenized; try again")
        self.num_questions += 1
        self.question_bytes += size
        try:
            yield
        finally:
            self.num_questions -= 1
            self.question_bytes -= size


def num_tokens(question: Tokenize | Detokenize, reply: TokenizeReply | DetokenizeReply) -> int:
    """The tokens that the tokenizer made, or read."""
    if isinstance(reply, TokenizeReply):
        return len(reply.token_ids) // 4
    return len(question.token_ids) // 4 if isinstance(question, Detokenize) else 0
