"""A logits processor: `"vllm_xargs": {"target_token": 7}` makes every token of an answer the seventh."""

import torch

from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.output.logits_processor import BatchUpdate, LogitsBatch, LogitsProcessor


class TargetToken(LogitsProcessor):
    def __init__(self, config: object, device: torch.device, max_rows: int) -> None:
        self._device = device
        self._targets = torch.zeros(max_rows, dtype=torch.int64)  # by row, on the host

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        target = params.extra_args.get("target_token")
        if target is not None and (not isinstance(target, int) or target < 0):
            raise ValueError("target_token must be a token id")

    @classmethod
    def wants(cls, params: SamplingParams) -> bool:
        return "target_token" in params.extra_args

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        for added in batch_update.added if batch_update else ():
            self._targets[added.row] = added.params.extra_args["target_token"]

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        targets = self._targets[torch.from_numpy(batch.rows).long()].clamp(max=logits.shape[1] - 1)
        targets = targets.to(self._device, non_blocking=True)
        return torch.full_like(logits, -torch.inf).scatter_(1, targets[:, None], 0.0)
