"""What a logits processor is: a class that changes logits of the requests that want it, for all of them at once.

The interface is that of vLLM's version 1 where it can be, with rows instead of places in the batch: a request has one row from its
first step to its last. Tokens are read on the device (`LogitsBatch.token_ids`), since with asynchronous scheduling the host does not
know the last one yet; so what a processor computes is a function of the request's parameters and tokens, and the same after any death.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.sampling import SamplingParams


class AddedRequest(NamedTuple):
    """A request has a row from now on. After a preemption or a death it comes anew, with all its tokens so far."""

    row: int
    params: SamplingParams  # `extra_args` are the client's vllm_xargs
    prompt_token_ids: NDArray[np.int32]
    output_token_ids: NDArray[np.int32]  # so far


class BatchUpdate(NamedTuple):
    """The changes since the last call; `removed` comes before `added`, where both name a row."""

    removed: list[int]
    added: list[AddedRequest]


class LogitsBatch(NamedTuple):
    """The lines of one call of `apply`, host side but for the tokens. Nothing here waits for the device."""

    rows: NDArray[np.int32]  # [l]: the row of each line
    num_tokens: NDArray[np.int64]  # [l]: tokens before the one that is sampled, the prompt's included
    num_prompt_tokens: NDArray[np.int64]  # [l]
    # int32 [l, longest] on the device; what stands behind num_tokens means nothing
    token_ids: Callable[[], torch.Tensor]


class LogitsProcessor(ABC):
    """One is made in each worker that samples, and used by its stepper thread alone."""

    def __init__(self, config: MeshConfig, device: torch.device, max_rows: int) -> None:  # noqa: B027
        """Rows are numbers below max_rows."""

    @classmethod  # noqa: B027
    def validate_params(cls, params: SamplingParams) -> None:
        """Called for each request, in frontends and by `LLM`. ValueError refuses it."""

    @classmethod
    def wants(cls, params: SamplingParams) -> bool:
        """Whether the request is processed. Those that no processor wants are sampled by kernels, in CUDA graphs."""
        return True

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether it never changes which token is the likeliest: it is left out for greedy requests then, and comes after the
        temperature; else it comes before penalties."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Requests that it wants have come or gone; None: none has. Called before `apply`."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Logits [l, vocab] of the requests that it wants, changed in place or new. It should not wait for the device."""
