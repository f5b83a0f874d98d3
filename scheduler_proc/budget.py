"""How many tokens a step may compute while others wait for their next token.

A step that holds a long prompt makes every running stream wait for it. The limit on prompt tokens in a step with running
decodes is learned: the measured rate of prompt-heavy steps, times the inter-token latency that is aimed at.
"""

TARGET_STEP_S = 0.05
MIN_PREFILL_TOKENS = 256  # below this a step's fixed cost dominates
MEASURE_FROM_TOKENS = 256  # steps with fewer prompt tokens say nothing about the rate
SMOOTHING = 0.3


class StepBudget:
    """Pure: fed with finished steps, asked before each plan."""

    def __init__(self, max_num_batched_tokens: int, target_step_s: float = TARGET_STEP_S) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.target_step_s = target_step_s
        self.tokens_per_s = 0.0  # 0: not measured yet

    def learn(self, num_tokens: int, num_decodes: int, duration_s: float) -> None:
        """A step of so many tokens, so many of them decodes, took so long on the device."""
        if num_tokens - num_decodes < MEASURE_FROM_TOKENS or duration_s <= 0:
            return
        rate = num_tokens / duration_s
        self.tokens_per_s = (
            rate if not self.tokens_per_s else self.tokens_per_s + SMOOTHING * (rate - self.tokens_per_s)
        )

    def prefill_limit(self, num_decodes: int) -> int:
        """Prompt tokens that the next step may hold beside `num_decodes` running decodes."""
        room = self.max_num_batched_tokens - num_decodes
        if not num_decodes or not self.tokens_per_s:
            return room
        affordable = int(self.tokens_per_s * self.target_step_s) - num_decodes
        return max(0, min(room, max(affordable, MIN_PREFILL_TOKENS)))
