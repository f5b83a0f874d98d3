"""The words that a row's output may not have, as sequences of tokens: what follows from those that stand at its end. No host waits."""

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ANY_TOKEN, NO_TOKEN = -1, -2


class BannedWords:
    """The last token of a sequence may not come where the rest of it stands at the end of the output."""

    def __init__(self, words: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self._longest = max(map(len, words)) - 1
        begins = np.full((len(words), self._longest), ANY_TOKEN, np.int32)
        for nth, word in enumerate(words):
            begins[nth, self._longest + 1 - len(word) :] = word[:-1]
        self._begins = torch.from_numpy(begins).to(device, non_blocking=True)
        self._last = torch.tensor([word[-1] for word in words], dtype=torch.int64).to(device, non_blocking=True)

    def ban(self, line: Tensor, output: Tensor) -> None:
        """Changes the logits line [vocab] that follow the row's output, int32 [n]."""
        end = output[max(0, len(output) - self._longest) :]
        end = F.pad(end, (self._longest - len(end), 0), value=NO_TOKEN)
        stands = ((self._begins == end) | (self._begins == ANY_TOKEN)).all(dim=1)
        line.index_add_(0, self._last, torch.where(stands, -torch.inf, 0.0).to(line.dtype))


@lru_cache(maxsize=1024)
def banned_words(words: tuple[tuple[int, ...], ...], device: torch.device) -> BannedWords:
    """Made once for the rows that have them."""
    return BannedWords(words, device)
