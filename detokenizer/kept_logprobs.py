"""Log-probabilities of a request whose client may come back: the columns as they came, which take a fifth of what entries take.

Entries are made when somebody reads them. Pure; owned by request_state.py.
"""

from array import array
from bisect import bisect_right

from meshlm.detokenizer.decode import TokenTable
from meshlm.protocol.edges.text import PositionLogprobs
from meshlm.protocol.edges.token import LogprobColumns
from meshlm.protocol.logprobs import each_position

ENTRY_BYTES = 130  # of one entry, as Python objects
OBJECTS_BYTES = 400  # of columns, beside what is in them


class KeptLogprobs:
    """Begins with the first output token. `delivered`: entries of the first ones, which another detokenizer made."""

    __slots__ = ("_begins", "_columns", "_delivered", "_num_chars", "num_bytes")

    def __init__(self, delivered: list[PositionLogprobs]) -> None:
        self._delivered = delivered
        self._begins: list[int] = []  # where each of the columns begins
        self._columns: list[tuple[LogprobColumns, int]] = []  # and how many of its positions are left out first
        self._num_chars = array("i")  # that each token brought to the text, behind those delivered
        self.num_bytes = sum(ENTRY_BYTES * (1 + len(position.top)) for position in delivered)

    def __len__(self) -> int:
        return len(self._delivered) + len(self._num_chars)

    def add(self, columns: LogprobColumns, sizes: list[int], skip: int) -> None:
        """Takes those of the next tokens. sizes: the characters that each brings to the text; skip: positions that are left out."""
        self._begins.append(len(self))
        self._columns.append((columns, skip))
        self._num_chars.extend(sizes)
        parts = (columns.logprobs, columns.ranks, columns.top_ids, columns.top_logprobs)
        self.num_bytes += OBJECTS_BYTES + sum(map(len, parts))

    def entries(self, begin: int, end: int, ids: "array[int]", table: TokenTable) -> list[PositionLogprobs]:
        """The entries of output tokens begin .. end - 1, as many of them as there are. ids: all output tokens."""
        found = self._delivered[begin:end]
        begin, end = begin + len(found), min(end, len(self))
        while begin < end:
            nth = bisect_right(self._begins, begin) - 1
            until = min(end, self._begins[nth + 1] if nth + 1 < len(self._begins) else end)
            before = len(self._delivered)
            columns, skip = self._columns[nth]
            sizes = self._num_chars[begin - before : until - before]
            found += each_position(columns, ids, sizes, begin, table, skip + begin - self._begins[nth])
            begin = until
        return found
