"""The times that Whisper writes between words: which tokens may follow those that are there (Radford et al. 2022, section 4.5).

- The first token is a time, and not a late one.
- Times stand in pairs, the end of a segment and the begin of the next; the end of the text may stand in the place of the second.
- No time is before one that was written. A begin may be the end before it, an end is later than its begin.
- Where all times together are likelier than any other token, the next token is a time.

A request asks for it by `extra_args: {"whisper_timestamps": true}`.
"""

import torch
from torch import Tensor

from meshlm.protocol.audio import WHISPER_TIMESTAMPS
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.output.logits_processor import BatchUpdate, LogitsBatch, LogitsProcessor


class TimestampRules(LogitsProcessor):
    """See `LogitsProcessor`. It has no state: what may follow is a function of the tokens."""

    def __init__(self, config: MeshConfig, device: torch.device, max_rows: int) -> None:
        super().__init__(config, device, max_rows)
        assert config.resolved is not None
        speech = config.resolved.speech
        assert speech is not None
        self._zero, self._max_initial_timestamp_index = speech.no_timestamps + 1, speech.max_initial_timestamp_index
        self._text_end = min((*config.resolved.eos_token_ids, speech.no_timestamps))  # tokens of words are before it

    @classmethod
    def wants(cls, params: SamplingParams) -> bool:
        return params.extra_args.get(WHISPER_TIMESTAMPS) is True

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Nothing is kept."""

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        """Logits [l, vocab] -> the same, where tokens that may not follow have no chance."""
        device, tokens = logits.device, batch.token_ids()
        columns = torch.stack((torch.from_numpy(batch.num_tokens), torch.from_numpy(batch.num_prompt_tokens)))
        ends, begins = columns.to(device, non_blocking=True)[:, :, None]  # each [l, 1]
        at = torch.arange(tokens.shape[1], device=device)
        written = (at >= begins) & (at < ends)
        is_time = (tokens >= self._zero) & written
        where = torch.where(is_time, at, -1).amax(1, keepdim=True)  # of the last time
        latest = torch.where(where < 0, self._zero - 1, tokens.gather(1, where.clamp(min=0)))

        def is_time_at(back: int) -> Tensor:
            """Whether the token so many places before the next one is a time; [l, 1]."""
            found: Tensor = is_time.gather(1, (ends - back).clamp(min=0)) & (ends - back >= begins)
            return found

        first, last = ends == begins, is_time_at(1)
        paired = is_time_at(2) | (ends - begins < 2)
        ids = torch.arange(logits.shape[1], device=device)
        times = ids >= self._zero
        earliest = torch.where(last & ~paired, latest, latest + 1)
        banned = ids == self._zero - 1
        banned = banned | (times & (last & paired)) | ((ids < self._text_end) & (last & ~paired))
        banned = banned | (times & (ids < earliest)) | (~times & first)
        if self._max_initial_timestamp_index >= 0:
            banned = banned | ((ids > self._zero + self._max_initial_timestamp_index) & first)
        logits = logits.masked_fill(banned, -torch.inf)
        likely = logits.float()
        of_times = likely[:, self._zero :].logsumexp(1, keepdim=True)
        others = likely[:, : self._zero].amax(1, keepdim=True)
        return logits.masked_fill(~times & (of_times > others), -torch.inf)
