"""How many tokens a step may compute while others wait for their next token, and how many steps may be on their way.

A step that holds a long prompt makes every running stream wait for it (chunked prefill as in Agrawal et al. 2024, "Sarathi-Serve").
Every stream needs its steps anyway, and a step's cost is flat up to some hundred tokens and a straight line beyond: for the same tokens
in the same number of steps, even steps take the least time. So prompts are spread: a step holds as many prompt tokens as come in for
each output token, and at least so many that the GPU is busy; more when they pile up. The longest step is the limit, by rates that are
learned from finished steps: what a prompt token costs, and what each earlier token costs that it attends to. A step holds as many
tokens of a long prompt as of a short one, so it takes longer the further the prompt is, up to the longest bearable wait
(--max-itl-ms; docs/adr/0007-steps-of-long-prompts.md).
"""

import math

EVEN_TOKENS = 1024  # steps with prompts hold so many; fewer leave the products short of work, more make streams wait
# ... behind a context of CONTEXT tokens: each such step reads the long caches of all decodes besides
LONG_EVEN_TOKENS = 1536
EVEN_PROMPT_S = 0.012  # ... or prompts for so long: where tokens are quick, what each step with prompts costs counts
KEEP_UP = 1.15  # ... or so many times what comes in
PATIENCE_STEPS = 32  # ... or a part of what waits, such that it is gone after about so many steps
WAVES = True  # behind a context of CONTEXT tokens steps are whole waves of attention's tiles, where workers say what fills the GPU
LONG_PATIENCE_STEPS = 64  # ... and wait so long: a long prompt alone is no queue
REQUESTS_REMEMBERED = 32  # what comes in is known from about so many that ended
FULL_FROM_S = 0.05  # without spreading: shorter steps are better replayed from CUDA graphs, which hold fewer tokens
LONGEST_TARGET_S = 0.055
BEARABLE_S = 0.12  # ... and with the context of long prompts, up to here
LONGEST_STRETCH = 7.0  # where decodes alone take long (a large model), the longest grows with them
MANY_DECODES = 128  # ... and with their number beyond this: each step reads the cache of all of them
MIN_PREFILL_TOKENS = 256  # below this a step's fixed cost dominates
MOST_MIXED_TOKENS = 4096  # with decodes among them: more make the products no faster, and who decodes waits for them
GRID = 128  # steps of more than a few end at a multiple of this; at coarser ones the larger they are
MEASURE_FROM_TOKENS = 256  # steps with fewer prompt tokens say nothing about the rate
LEAST_PROMPT_SHARE = 0.5  # of a mixed step's time, whatever decodes took lately
SMOOTHING = 0.3
# earlier tokens: an error of as many is learned by what they cost and by what a token costs, in equal parts
CONTEXT = 4096
LEAST_PROMPT_S = 1e-8
SHORTEST_STEP_S = 1e-6  # what is shorter was not measured
QUICK_STEP_S = 0.002  # shorter steps end before the next plan can arrive, unless one more is on its way


class StepBudget:
    """Pure: fed with finished steps and requests, asked before each plan."""

    def __init__(
        self, max_num_batched_tokens: int, *, even: bool = True, max_itl_s: float | None = None, wave: int = 0
    ) -> None:
        """even: spread prompts; else they have all that decodes leave of a step, if it is a long one then.

        max_itl_s: the longest bearable step, whatever its prompts. wave: prompt tokens whose attention fills the device once (0: not
        known)."""
        self.max_num_batched_tokens, self._spreads, self._max_itl_s = max_num_batched_tokens, even, max_itl_s
        self._wave = wave
        self.prompt_s = 0.0  # what a prompt token adds to a step; 0: not measured yet
        self.pair_s = 0.0  # ... and each earlier token that it attends to
        self.decode_s = 0.0  # of steps without prompts
        self._prompt_tokens = self._output_tokens = 0.0  # of requests that ended, the older the less

    def learn(self, num_tokens: int, num_decodes: int, duration_s: float, num_pairs: float = 0.0) -> None:
        """A step of so many tokens, so many of them decodes, took so long on the device. num_pairs: of its prompt tokens and the
        earlier ones that each attends to."""
        if not SHORTEST_STEP_S <= duration_s < math.inf:
            return
        if num_tokens == num_decodes:
            self.decode_s += SMOOTHING * (duration_s - self.decode_s) if self.decode_s else duration_s
        elif num_tokens - num_decodes >= MEASURE_FROM_TOKENS:
            decodes_s = self.decode_s if num_decodes else 0.0
            each_s = max(duration_s - decodes_s, LEAST_PROMPT_SHARE * duration_s) / (num_tokens - num_decodes)
            self._learn_prompts(each_s, num_pairs / (num_tokens - num_decodes))

    def _learn_prompts(self, each_s: float, context: float) -> None:
        """A prompt token took so long, with so many before it: normalised least mean squares, of which the rate at one context is a
        moving average."""
        if not self.prompt_s:
            self.prompt_s = each_s
            return
        weight = context / CONTEXT
        error_s = SMOOTHING * (each_s - self.prompt_s - self.pair_s * context) / (1 + weight * weight)
        self.prompt_s = max(LEAST_PROMPT_S, self.prompt_s + error_s)
        self.pair_s = max(0.0, self.pair_s + error_s * weight / CONTEXT)

    def ended(self, prompt_tokens: int, output_tokens: int) -> None:
        """A request is over, for which so many prompt tokens were computed."""
        self._prompt_tokens += prompt_tokens - self._prompt_tokens / REQUESTS_REMEMBERED
        self._output_tokens += output_tokens - self._output_tokens / REQUESTS_REMEMBERED

    def prefill_limit(self, num_decodes: int, outstanding: int, context: int = 0) -> int:
        """Prompt tokens that the next step may hold beside `num_decodes` running decodes; so many are to be computed, and the first
        has `context` before it."""
        room = self.max_num_batched_tokens - num_decodes
        if not num_decodes or not self.prompt_s:
            return room
        if not self._spreads and room * self.prompt_s >= FULL_FROM_S:
            return (
                room
                if self._max_itl_s is None
                else min(room, max(self._tokens_in(self._max_itl_s, context), MIN_PREFILL_TOKENS))
            )
        tokens = min(self._even(num_decodes, outstanding, context), self._longest(num_decodes, context))
        return max(0, min(room, max(tokens - num_decodes, MIN_PREFILL_TOKENS)))

    def _even(self, num_decodes: int, outstanding: int, context: int) -> int:
        """Tokens of a step such that all steps hold about the same."""
        arriving = KEEP_UP * num_decodes * self._prompt_tokens / max(1.0, self._output_tokens)
        prompts = max(arriving, EVEN_PROMPT_S / self.prompt_s)
        if WAVES and context >= CONTEXT and self._wave >= GRID:
            return self._whole_waves(num_decodes + max(prompts, outstanding / LONG_PATIENCE_STEPS), context)
        prompts = max(prompts, outstanding / PATIENCE_STEPS)
        tokens = max(LONG_EVEN_TOKENS if context >= CONTEXT else EVEN_TOKENS, num_decodes + int(prompts))
        return on_grid(tokens + _grid(tokens) // 2)

    def _whole_waves(self, tokens: float, context: int) -> int:
        """A step with whole waves of attention's tiles; so many tokens are the mean of such steps."""
        waves = max(1.0, tokens / self._wave)
        nth = round(context / (waves * self._wave))  # of the prompt's steps
        return int((math.floor((nth + 1) * waves) - math.floor(nth * waves)) * self._wave) // GRID * GRID

    def _longest(self, num_decodes: int, context: int) -> int:
        """Tokens of the longest step: as many as without a context, but none that takes longer than is bearable."""
        longest_s = max(LONGEST_TARGET_S * max(1.0, num_decodes / MANY_DECODES), LONGEST_STRETCH * self.decode_s)
        bearable_s = max(longest_s, BEARABLE_S) if self._max_itl_s is None else self._max_itl_s
        affordable = min(self._tokens_in(longest_s, 0), self._tokens_in(bearable_s, context))
        return on_grid(min(num_decodes + affordable, MOST_MIXED_TOKENS))

    def _tokens_in(self, step_s: float, context: int) -> int:
        """Prompt tokens that fill a step of so long beside its decodes: each attends to all before it."""
        seconds = max(0.0, step_s - self.decode_s)
        first_s = self.prompt_s + self.pair_s * context
        return int(2 * seconds / (first_s + math.sqrt(first_s * first_s + 2 * self.pair_s * seconds)))

    def depth(self, async_depth: int) -> int:
        """Steps that may be in flight."""
        return async_depth + 1 if async_depth > 1 and 0 < self.decode_s < QUICK_STEP_S else async_depth


def on_grid(num_tokens: int) -> int:
    """The most tokens up to so many that a CUDA graph holds without padding (workers/graphs/dispatcher.py): up to a fifth fewer."""
    if num_tokens <= 4 * GRID:
        return num_tokens
    step = _grid(num_tokens)
    return num_tokens // step * step


def _grid(num_tokens: int) -> int:
    return max(GRID, 1 << ((num_tokens - 1).bit_length() - 3))
