"""How many lookups an endless store would have answered. Pure.

It counts keys in 16 KiB with a HyperLogLog sketch (Flajolet, Fusy, Gandouet and Meunier, 2007), by the estimator of historic inverse
probability (Cohen, "All-distances sketches", 2014; Ting, "Streamed approximate counting of distinct elements", 2014).

An endless store lacks a key that is looked up before anybody ever computed it, and no other. So keys that are looked up and keys that
are offered are counted together, and each growth of the count belongs to what caused it. HyperLogLog alone knows the count only; this
estimator adds, whenever a key changes the sketch, one by the probability that a new key does so. The standard error is 0.65 %.
"""

BITS = 14
_REGISTERS = 1 << BITS


class Ceiling:
    """Keys are hashes already: their first bits choose a register, the zeros that follow are what it keeps."""

    def __init__(self) -> None:
        self._ranks = bytearray(_REGISTERS)
        self._sum = float(_REGISTERS)  # of 2 ** -rank: of so many registers' shares the next new key changes one
        self.num_lookups = 0
        self.num_first = 0.0  # lookups of keys that nobody had seen

    @property
    def hit_rate(self) -> float:
        """0 .. 1 of all lookups so far; 0 before the first."""
        return max(0.0, 1 - self.num_first / self.num_lookups) if self.num_lookups else 0.0

    def looked_up(self, key: bytes) -> None:
        self.num_lookups += 1
        self.num_first += self._add(key)

    def offered(self, key: bytes) -> None:
        self._add(key)

    def _add(self, key: bytes) -> float:
        """The estimated number of new keys that this one stands for: 0 where it changes nothing."""
        number = int.from_bytes(key[:8], "little") ^ int.from_bytes(
            key[-8:], "little"
        )  # of the namespace, and of its hash
        register, rest = number & (_REGISTERS - 1), number >> BITS
        rank = 65 - BITS - rest.bit_length()
        if rank <= (before := self._ranks[register]):
            return 0.0
        grown = _REGISTERS / self._sum
        self._ranks[register] = rank
        self._sum += 2.0**-rank - 2.0**-before
        return grown
