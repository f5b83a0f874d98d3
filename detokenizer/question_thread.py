"""Answers questions (/tokenize, /detokenize) one by one in a thread of its own, beside the prompts. Owned and called by io.py."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from meshlm.detokenizer import replies
from meshlm.detokenizer.core import Detokenizer
from meshlm.detokenizer.encode import Encoder
from meshlm.detokenizer.questions import Question, Questions
from meshlm.protocol.edges.text import Detokenize, DetokenizeReply, Tokenize, TokenizeReply
from meshlm.protocol.wire.ids import Handle, Identity
from meshlm.runtime.process import in_hand

Reply = TokenizeReply | DetokenizeReply


class _Model(NamedTuple):
    """What answers are made with, once it is loaded."""

    encoder: Encoder
    core: Detokenizer
    in_loop: Callable[..., None]


class QuestionThread:
    """`log_failure` is called for what no client's text alone should have been able to raise."""

    def __init__(self, send: Callable[[Identity, Reply], None], log_failure: Callable[[str], None]) -> None:
        self._send, self._log_failure = send, log_failure
        self._waiting = Questions()
        self._model: _Model | None = None
        self._is_busy = False
        self._thread = ThreadPoolExecutor(1, "question")

    def begin(self, encoder: Encoder, core: Detokenizer, in_loop: Callable[..., None]) -> None:
        """Answer from now on, also what came before. in_loop: calls a function in the loop, from any thread."""
        self._model = _Model(encoder, core, in_loop)
        self._next()

    def ask(self, sender: Identity, message: Tokenize | Detokenize) -> None:
        if (refusal := self._waiting.add(sender, message)) is not None:
            self._send(sender, refusal)
        self._next()

    def cancel(self, sender: Identity, handle: Handle) -> None:
        """Nobody waits for it any more."""
        self._waiting.cancel(sender, handle)

    def lost(self, sender: Identity) -> None:
        """It is gone, and its questions with it."""
        self._waiting.lost(sender)

    def _next(self) -> None:
        if not self._is_busy and self._model is not None and (question := self._waiting.next_question()) is not None:
            self._is_busy = True
            self._thread.submit(self._answer, question, self._model)

    def _answer(self, question: Question, model: _Model) -> None:
        """Called in the thread."""
        core, message = model.core, question.message
        reply: Reply
        try:
            with in_hand.hold(in_hand.question_name(question.sender, message.handle)):
                reply = replies.answer(message, model.encoder, core.table, core.vocab_size, core.max_model_len)
        except BaseException as error:  # a panic of the tokenizer's is no Exception; the client waits for an answer
            self._log_failure("the tokenizer failed")
            kind = TokenizeReply if isinstance(message, Tokenize) else DetokenizeReply
            reply = kind(message.handle, error=f"the text cannot be tokenized: {error}", param="prompt")
        model.in_loop(self._answered, question.sender, reply)

    def _answered(self, to: Identity, reply: Reply) -> None:
        self._is_busy = False
        self._send(to, reply)
        self._next()

    def close(self) -> None:
        self._waiting = Questions()
        self._thread.shutdown(wait=False, cancel_futures=True)
