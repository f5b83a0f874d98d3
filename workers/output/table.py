"""Sampling parameters by row, as columns: a step picks its rows by indexing, without a loop over requests."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.output.banned_words import BannedWords
from meshlm.workers.output.processors import Processors

ALWAYS: Final = np.iinfo(np.int32).max
EDITS = 16  # ids of a request whose logits kernels/penalties edits


def edits(params: SamplingParams) -> list[tuple[int, float, int]] | None:
    """Bias, bad words of one token, min_tokens and tokens that come not first as (id, what is added, before which output index), each
    id once; None where that is not enough."""
    stops = dict.fromkeys(params.stop_token_ids + params.eos_token_ids) if params.min_tokens else {}
    found = [(token, -np.inf, params.min_tokens) for token in stops]
    found += [(token, -np.inf, 1) for token in params.begin_suppress_token_ids if token not in stops]
    found += [(token, bias, ALWAYS) for token, bias in params.logit_bias.items()]
    found += [(word[0], -np.inf, ALWAYS) for word in params.bad_words_token_ids]
    longer = any(len(word) > 1 for word in params.bad_words_token_ids)
    if params.allowed_token_ids or longer or len(found) > EDITS or len({token for token, _, _ in found}) < len(found):
        return None
    return found


class SamplingTable:
    """numpy columns of length max_rows. Rows that need a loop (bias, allowed ids, bad words, min_tokens) are listed in `special`."""

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
        self.by_torch_until = np.zeros(
            max_rows, np.int64
        )  # output index: tokens before it need more than the kernels do
        self.special: dict[int, SamplingParams] = {}
        self.banned_words: dict[int, BannedWords] = {}
        self.logprob_token_ids: dict[int, tuple[int, ...]] = {}  # rows that want those of certain tokens
        self.processors: Processors | None = None  # of logits; set by the engine

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
        always = bool(params.logit_bias or params.allowed_token_ids or params.bad_words_token_ids)
        until = params.min_tokens or (1 if params.begin_suppress_token_ids else 0)
        self.by_torch_until[row] = 0 if edits(params) is not None else ALWAYS if always else until
        if always or until:
            self.special[row] = params
        else:
            self.special.pop(row, None)
        self.banned_words.pop(row, None)
        if params.bad_words_token_ids:
            self.banned_words[row] = BannedWords(params.bad_words_token_ids)
        self.logprob_token_ids.pop(row, None)
        if params.logprob_token_ids:
            self.logprob_token_ids[row] = params.logprob_token_ids

    def of_prompt(
        self, rows: NDArray[np.int32], starts: NDArray[np.int32], prompt_lens: NDArray[np.int64]
    ) -> NDArray[np.intp]:
        """Tells which of these rows want log-probabilities of prompt tokens that follow positions from `starts` on."""
        return np.flatnonzero((self.prompt_logprobs[rows] >= 0) & (starts < prompt_lens - 1))

    def need_torch(self, rows: NDArray[np.int32], output_index: NDArray[np.int64]) -> NDArray[np.intp]:
        """Tells which of these rows ask for more than kernels/penalties, top_k_top_p and sample do, for the token of this index."""
        return np.flatnonzero(self.by_torch_until[rows] > output_index)
