"""Questions about texts and ids (/tokenize, /detokenize): they wait here, and are answered one by one in a thread of their own.

They are no requests, so that streams and prompts do not wait for them. Small ones and large ones take turns: a small one waits for one
large one at most. A question whose client is gone is dropped if its answer has not begun. Owned and called by io.py.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from meshlm.detokenizer import replies
from meshlm.detokenizer.core import Detokenizer
from meshlm.detokenizer.encode import Encoder
from meshlm.protocol.edges.text import Detokenize, DetokenizeReply, Tokenize, TokenizeReply, num_bytes_of
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity
from meshlm.runtime.process import in_hand

LARGE_BYTES = 64 << 10
MAX_BYTES = 64 << 20  # of all that wait, beyond which new ones get 503
FULL = "too many questions wait to be tokenized; try again"
Reply = TokenizeReply | DetokenizeReply


class Question(NamedTuple):
    sender: Identity
    message: Tokenize | Detokenize
    num_bytes: int


class Questions:
    """Small and large questions, each by arrival."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._queues: tuple[dict[tuple[Identity, Handle], Question], ...] = ({}, {})  # small and large, by arrival
        self._turn = 0  # the queue to take from next
        self.num_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def add(self, sender: Identity, message: Tokenize | Detokenize) -> Reply | None:
        """The refusal when too much waits already."""
        size = num_bytes_of(message.prompt) if isinstance(message, Tokenize) else len(message.token_ids)
        if self.num_bytes and self.num_bytes + size > self._max_bytes:
            reply = TokenizeReply if isinstance(message, Tokenize) else DetokenizeReply
            return reply(message.handle, error=FULL, kind=ErrorKind.OVERLOADED)
        self._queues[size > LARGE_BYTES][sender, message.handle] = Question(sender, message, size)
        self.num_bytes += size
        return None

    def next_question(self) -> Question | None:
        for turn in (self._turn, 1 - self._turn):
            queue = self._queues[turn]
            if queue:
                self._turn = 1 - turn
                question = queue.pop(next(iter(queue)))
                self.num_bytes -= question.num_bytes
                return question
        return None

    def cancel(self, sender: Identity, handle: Handle) -> None:
        """Drops a question whose client left, or has waited too long."""
        for queue in self._queues:
            question = queue.pop((sender, handle), None)
            self.num_bytes -= question.num_bytes if question else 0

    def lost(self, sender: Identity) -> None:
        for queue in self._queues:
            for key in [key for key in queue if key[0] == sender]:
                self.num_bytes -= queue.pop(key).num_bytes

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        assert self.num_bytes == sum(one.num_bytes for queue in self._queues for one in queue.values())


class QuestionThread:
    """`log_failure` is called for what no client's text alone should have been able to raise."""

    def __init__(self, send: Callable[[Identity, Reply], None], log_failure: Callable[[str], None]) -> None:
        self._send, self._log_failure = send, log_failure
        self._waiting = Questions()
        self._model: tuple[Encoder, Detokenizer] | None = None  # once it is loaded
        self._is_busy = False
        self._thread = ThreadPoolExecutor(1, "question")

    def begin(self, encoder: Encoder, core: Detokenizer, in_loop: Callable[..., None]) -> None:
        """Answer from now on, also what came before. in_loop: calls a function in the loop, from any thread."""
        self._model, self._in_loop = (encoder, core), in_loop
        self._next()

    def ask(self, sender: Identity, message: Tokenize | Detokenize) -> None:
        if (refusal := self._waiting.add(sender, message)) is not None:
            self._send(sender, refusal)
        self._next()

    def cancel(self, sender: Identity, handle: Handle) -> None:
        self._waiting.cancel(sender, handle)

    def lost(self, sender: Identity) -> None:
        self._waiting.lost(sender)

    def _next(self) -> None:
        if not self._is_busy and self._model is not None and (question := self._waiting.next_question()) is not None:
            self._is_busy = True
            self._thread.submit(self._answer, question, *self._model)

    def _answer(self, question: Question, encoder: Encoder, core: Detokenizer) -> None:
        message = question.message
        reply: Reply
        try:
            with in_hand.hold(in_hand.question_name(question.sender, message.handle)):
                reply = replies.answer(message, encoder, core.table, core.vocab_size, core.max_model_len)
        except BaseException as error:  # a panic of the tokenizer's is no Exception; the client waits for an answer
            self._log_failure("the tokenizer failed")
            kind = TokenizeReply if isinstance(message, Tokenize) else DetokenizeReply
            reply = kind(message.handle, error=f"the text cannot be tokenized: {error}", param="prompt")
        self._in_loop(self._answered, question.sender, reply)

    def _answered(self, to: Identity, reply: Reply) -> None:
        self._is_busy = False
        self._send(to, reply)
        self._next()

    def close(self) -> None:
        self._waiting = Questions()
        self._thread.shutdown(wait=False, cancel_futures=True)
