"""How many tokens a step may compute while others wait for their next token, and how many steps may be on their way.

A step that holds a long prompt makes every running stream wait for it; steps of nothing but prompts waste the weights' reading that
decodes could have shared. So prompt tokens beside running decodes are limited to what makes the step a few times as long as one of
decodes alone, and to the longest that is bearable while many requests wait (chunked prefill as in Agrawal et al. 2024,
"Sarathi-Serve", with the step's length as the budget), and to as many as the GPU needs to be busy. Both rates are learned from finished
steps.
"""

import math

STRETCH = 4.0  # a mixed step, in decode steps; 2.2 starved prompts at 64 streams of Llama-3.1-8B on an H200
SHORTEST_TARGET_S, LONGEST_TARGET_S = 0.012, 0.055
LONGEST_STRETCH = 7.0  # where decodes alone take long (a large model), the longest grows with them
MANY_DECODES = 128  # ... and with their number beyond this: each step reads the cache of all of them
LONG_QUEUE = 0.2  # waiting requests for each running one, from which on steps are as long as they may be
MIN_PREFILL_TOKENS = 256  # below this a step's fixed cost dominates
MOST_MIXED_TOKENS = 3072  # with decodes among them: more make the products no faster, and who decodes waits for them
GRID = 128  # steps of more than a few end at a multiple of this; at coarser ones the larger they are
MEASURE_FROM_TOKENS = 256  # steps with fewer prompt tokens say nothing about the rate
SMOOTHING = 0.3
SHORTEST_STEP_S = 1e-6  # what is shorter was not measured
QUICK_STEP_S = 0.002  # shorter steps end before the next plan can arrive, unless one more is on its way


class StepBudget:
    """Pure: fed with finished steps, asked before each plan."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.tokens_per_s = 0.0  # of steps with prompts; 0: not measured yet
        self.decode_s = 0.0  # of steps without

    def target_step_s(self, num_decodes: int, num_waiting: int) -> float:
        """How long a step with prompts and decodes should take."""
        longest = max(LONGEST_TARGET_S * max(1.0, num_decodes / MANY_DECODES), LONGEST_STRETCH * self.decode_s)
        if num_waiting > LONG_QUEUE * num_decodes:
            return longest
        return min(longest, max(SHORTEST_TARGET_S, STRETCH * self.decode_s))

    def learn(self, num_tokens: int, num_decodes: int, duration_s: float) -> None:
        """A step of so many tokens, so many of them decodes, took so long on the device."""
        if not SHORTEST_STEP_S <= duration_s < math.inf:
            return
        if num_tokens == num_decodes:
            self.decode_s += SMOOTHING * (duration_s - self.decode_s) if self.decode_s else duration_s
        elif num_tokens - num_decodes >= MEASURE_FROM_TOKENS:
            rate = num_tokens / duration_s
            self.tokens_per_s += SMOOTHING * (rate - self.tokens_per_s) if self.tokens_per_s else rate

    def prefill_limit(self, num_decodes: int, num_waiting: int) -> int:
        """Prompt tokens that the next step may hold beside `num_decodes` running decodes."""
        room = self.max_num_batched_tokens - num_decodes
        if not num_decodes or not self.tokens_per_s:
            return room
        affordable = int(self.tokens_per_s * self.target_step_s(num_decodes, num_waiting))
        affordable = on_grid(min(affordable, MOST_MIXED_TOKENS)) - num_decodes
        return max(0, min(room, max(affordable, MIN_PREFILL_TOKENS)))

    def depth(self, async_depth: int) -> int:
        """Steps that may be in flight."""
        return async_depth + 1 if async_depth > 1 and 0 < self.decode_s < QUICK_STEP_S else async_depth


def on_grid(num_tokens: int) -> int:
    """The most tokens up to so many that a CUDA graph holds without padding (workers/cuda/graphs.py): up to a fifth fewer."""
    if num_tokens <= 4 * GRID:
        return num_tokens
    step = max(GRID, 1 << ((num_tokens - 1).bit_length() - 3))
    return num_tokens // step * step
