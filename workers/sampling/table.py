"""Sampling parameters by row, as columns: a step picks its rows by indexing, without a loop over requests."""

import numpy as np
from numpy.typing import NDArray

from meshlm.protocol.sampling import SamplingParams


class SamplingTable:
    """numpy columns of length max_rows. Rows that need a loop (bias, allowed ids, min_tokens) are listed in `special`."""

    def __init__(self, max_rows: int) -> None:
        self.temperature = np.ones(max_rows, np.float32)
        self.top_p = np.ones(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int64)  # 0: off
        self.min_p = np.zeros(max_rows, np.float32)
        self.repetition = np.ones(max_rows, np.float32)
        self.presence = np.zeros(max_rows, np.float32)
        self.frequency = np.zeros(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.logprobs = np.full(max_rows, -1, np.int64)
        self.prompt_logprobs = np.full(max_rows, -1, np.int64)
        self.penalised = np.zeros(max_rows, np.bool_)
        self.general = np.zeros(max_rows, np.bool_)  # more than kernels/truncate and kernels/sample do
        self.special: dict[int, SamplingParams] = {}

    def set(self, row: int, params: SamplingParams) -> None:
        """A request takes this row."""
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = max(0, params.top_k)
        self.min_p[row] = params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.seed[row] = params.seed
        self.logprobs[row] = params.logprobs
        self.prompt_logprobs[row] = params.prompt_logprobs
        self.penalised[row] = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.general[row] = bool(
            self.penalised[row]
            or params.logprobs >= 0
            or params.logit_bias
            or params.allowed_token_ids
            or params.min_tokens
        )
        if params.logit_bias or params.allowed_token_ids or params.min_tokens:
            self.special[row] = params
        else:
            self.special.pop(row, None)

    def needs_torch(self, rows: NDArray[np.int32]) -> bool:
        """Whether any of these rows asks for more than kernels/truncate and kernels/sample do."""
        return bool(self.general[rows].any())
