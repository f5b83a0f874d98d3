"""What a client that came back is told again of its request: piece by piece, with turns of the loop between, as others' tokens come
meanwhile. Pure; owned by journal.py.

The request goes on meanwhile. Rows of its new tokens come too early for its frontend, which drops them; the replay brings them too.
"""

from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.request_state import RequestState
from meshlm.protocol.edges import text as text_edge
from meshlm.protocol.edges.text import piece_len


class Replay:
    """One request, from token `at` on, to the connection that has it now."""

    __slots__ = ("_decoder", "_num_read", "_stop", "at", "is_first", "request")

    def __init__(self, request: RequestState, table: TokenTable, start: int) -> None:
        self.request, self.at, self.is_first = request, start, True
        self._decoder, self._stop = request.reader(table)
        self._num_read = 0

    @property
    def is_over(self) -> bool:
        return not self.is_first and self.at == len(self.request.output_token_ids)

    def next_piece(self) -> tuple[int, int, str] | None:
        """The next piece: where it begins and ends, and its text. None: what is before it is not read yet, and took its turn."""
        if self._num_read < (skipped := min(self.at, self._num_read + text_edge.PIECE_ENTRIES)):
            self._read(skipped)
            if skipped < self.at:
                return None
        request, begin = self.request, self.at
        end = min(begin + piece_len(request.sampling.logprobs), len(request.output_token_ids))
        if begin < request.cut < end:
            end = request.cut
        text = self._read(end)
        self.at, self.is_first = end, False
        return begin, end, text

    def _read(self, end: int) -> str:
        """The text that the tokens up to `end` have shown: read again, what was held back stays so."""
        request, stop = self.request, self._stop
        last = len(request.output_token_ids) - request.hidden
        texts = []
        for number in range(self._num_read, min(end, last)):
            text = self._decoder.push(request.output_token_ids[number])
            texts.append(text if stop is None else request.searched(stop, text, number + 1))
        self._num_read = end
        return "".join(texts)
