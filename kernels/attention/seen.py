"""What rows of attention see, for kernels that have no Triton (cpu/, plain torch)."""

from typing import NamedTuple

from torch import Tensor


class Seen(NamedTuple):
    """The keys that rows see, and how scores become weights."""

    scale: float
    window: int = 0  # the last so many keys; 0: all
    softcap: float = 0.0  # scores s become softcap tanh(s / softcap); 0: they stay
    chunk: int = 0  # the keys from the last multiple of this on; 0: all
    # float32 [heads]: one more logit of each head, which takes part in the softmax's sum only
    sinks: Tensor | None = None
    # float32 [heads]: a score has its head's slope times (key - query) added, by their positions (ALiBi)
    slopes: Tensor | None = None
