"""Choices of one detokenizer among which nothing happens but more text: taken in as columns, whatever their number. Pure.

Made by desk.py when two messages in a row have the same rows and nothing else; scheduler_proc/steady.py says why columns.

While it stands, the choices' token ids and times lag behind, and `settle` brings them up to date before anything else looks at them.
Choices whose chunks say more than text (token ids, usage, event ids) do not lag: their rows go the general way.
"""

from array import array
from collections.abc import Callable

from meshlm.frontend.burst import Burst, Form
from meshlm.frontend.choice import Choice
from meshlm.protocol.columns import Counters, pack_i32, unpack_i32
from meshlm.protocol.text_edge import TextDeltas

FEWEST = 16  # with fewer choices the loop is as fast
ONE = pack_i32([1])


class Steady:
    """Choices in the order of the message, all of which had news at `now`."""

    def __init__(self, handles: bytes, choices: list[Choice], now: float) -> None:
        self.choices, self.last_at = choices, now
        self._handles = handles
        self._starts = Counters(len(choice.token_ids) for choice in choices)
        self._eager: list[tuple[int, Choice]] = []  # whose rows go the general way
        self._takers: list[tuple[int, Callable[[str], None]]] = []
        forms: dict[int, Form] = {}
        for place, choice in enumerate(choices):
            plain = choice.exchange.plain(choice)
            if plain is None:
                self._eager.append((place, choice))
            elif isinstance(plain, Form):
                forms[place] = plain
            else:
                self._takers.append((place, plain))
        self._burst, self._places = Burst(list(forms.values())), list(forms)
        self._token_ids: list[array[int]] = []  # columns, one token of each choice

    def width_of(self, message: TextDeltas) -> int:
        """How many more tokens of each choice this message brings; 0 when it is something else."""
        if message.handles != self._handles or message.starts != self._starts.column():
            return 0
        if not message.counts:
            return 1
        width = unpack_i32(message.counts)[0]
        return width if message.counts == pack_i32([width]) * len(self.choices) else 0

    def take(self, message: TextDeltas, width: int, now: float) -> None:
        """Such a message's rows."""
        tokens = array("i", message.token_ids)
        self._token_ids += [tokens[nth::width] for nth in range(width)]
        self._starts.advance(width)
        self.last_at = now
        texts = message.texts
        if self._places:
            self._burst.send(texts if len(self._places) == len(texts) else [texts[place] for place in self._places])
        for place, take in self._takers:
            if texts[place]:
                take(texts[place])
        for place, choice in self._eager:
            ids = memoryview(tokens)[place * width : (place + 1) * width]
            choice.token_ids.extend(ids)
            choice.exchange.text(choice, ids, texts[place])

    def settle(self) -> None:
        """Tell the choices what came."""
        tokens, count = array("i", b"".join(self._token_ids)), len(self.choices)
        eager = {place for place, _ in self._eager}
        for place, choice in enumerate(self.choices):
            choice.last_at = self.last_at
            if place not in eager:
                choice.token_ids.extend(tokens[place::count])
        self._token_ids.clear()

    def check(self) -> None:
        """AssertionError when the columns contradict the choices."""
        starts = unpack_i32(self._starts.column())
        eager = {place for place, _ in self._eager}
        for place, choice in enumerate(self.choices):
            assert choice.handle == unpack_i32(self._handles)[place]
            assert len(choice.token_ids) + (0 if place in eager else len(self._token_ids)) == starts[place]
