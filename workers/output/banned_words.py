"""The words that a row's output may not have, as sequences of tokens: what follows from those that stand at its end. No host waits."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ANY_TOKEN, NO_TOKEN = -1, -2


class BannedWords:
    """The last token of a sequence may not come where the rest of it stands at the end of the output. Made once for a row."""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        self._longest = max(map(len, words)) - 1
        begins = np.full((len(words), self._longest), ANY_TOKEN, np.int32)
        for nth, word in enumerate(words):
            begins[nth, self._longest + 1 - len(word) :] = word[:-1]
        self._begins = torch.from_numpy(begins)
        self._last = torch.tensor([word[-1] for word in words], dtype=torch.int64)

    def ban(self, line: Tensor, output: Tensor) -> None:
        """Changes the logits line [vocab] that follow the row's output, int32 [n]."""
        if self._begins.device != line.device:  # once: a row stays on its device
            self._begins = self._begins.to(line.device, non_blocking=True)
            self._last = self._last.to(line.device, non_blocking=True)
        end = output[max(0, len(output) - self._longest) :]
        end = F.pad(end, (self._longest - len(end), 0), value=NO_TOKEN)
        stands = ((self._begins == end) | (self._begins == ANY_TOKEN)).all(dim=1)
        line.index_add_(0, self._last, torch.where(stands, -torch.inf, 0.0).to(line.dtype))
