"""Which offered keys the store takes: those that were offered often enough (`store_threshold`). Pure.

A key is offered whenever a rank has computed it. The default takes every key, for what was computed once is what comes back: an agent's
last turn is computed once, leaves the device, and is wanted by its next turn. What nobody wants again is the small queue's to drop
(eviction.py), and a copy to the host is cheap, as it goes beside the steps. A threshold of 2 takes what two requests had to compute:
right where most prompts never come back and what the copies take from the host's memory is missed elsewhere.
"""

from collections import OrderedDict

MAX_TRACKED = 64_000  # keys whose offers are counted, as vLLM has it


class Admission:
    """threshold: offers of a key with which it is taken; 0 and 1 take all."""

    def __init__(self, threshold: int = 0, max_tracked: int = MAX_TRACKED) -> None:
        self._threshold, self._most = threshold, max_tracked
        self._offers: OrderedDict[bytes, int] = OrderedDict()  # those that were offered last, last

    def takes(self, key: bytes) -> bool:
        """Counts an offer."""
        if self._threshold < 2:
            return True
        count = self._offers.pop(key, 0) + 1
        if count >= self._threshold:
            return True
        self._offers[key] = count
        if len(self._offers) > self._most:
            self._offers.popitem(last=False)
        return False
