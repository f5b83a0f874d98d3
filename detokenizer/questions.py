"""Questions that wait for an answer: the texts and ids of /tokenize and /detokenize. Pure; owned by io.py.

They are no requests and have a thread of their own, so that streams and prompts do not wait for them. Small ones and large ones take
turns: a small one waits for one large one at most. A question whose client is gone is dropped if its answer has not begun.
"""

from typing import NamedTuple

from meshlm.protocol.edges.text import Detokenize, DetokenizeReply, Tokenize, TokenizeReply, num_bytes_of
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity

LARGE_BYTES = 64 << 10
MAX_BYTES = 64 << 20  # of all that wait, beyond which new ones get 503
FULL = "too many questions wait to be tokenized; try again"


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

    def add(self, sender: Identity, message: Tokenize | Detokenize) -> TokenizeReply | DetokenizeReply | None:
        """The refusal when too much waits already."""
        size = num_bytes_of(message.prompt) if isinstance(message, Tokenize) else len(message.token_ids)
        if self.num_bytes and self.num_bytes + size > self._max_bytes:
            reply = TokenizeReply if isinstance(message, Tokenize) else DetokenizeReply
            return reply(message.handle, error=FULL, kind=ErrorKind.OVERLOADED)
        self._queues[size > LARGE_BYTES][sender, message.handle] = Question(sender, message, size)
        self.num_bytes += size
        return None

    def next_question(self) -> Question | None:
        """The next one to answer."""
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
        """A frontend is gone, and all its clients."""
        for queue in self._queues:
            for key in [key for key in queue if key[0] == sender]:
                self.num_bytes -= queue.pop(key).num_bytes

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        assert self.num_bytes == sum(one.num_bytes for queue in self._queues for one in queue.values())
