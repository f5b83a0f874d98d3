"""The step budget learns from what steps took."""

import pytest
from bench import Bench, limits
from hypothesis import given
from hypothesis import strategies as st

from meshlm.scheduler_proc import budget
from meshlm.scheduler_proc.budget import StepBudget, on_grid


def test_without_decodes_or_measurements_all_room_is_for_prompts() -> None:
    fresh = StepBudget(8192)
    assert fresh.prefill_limit(0, 5) == 8192
    assert fresh.prefill_limit(100, 5) == 8092


def learned(decode_s: float = 0.007, prompt_s: float = 20e-6, max_num_batched_tokens: int = 8192) -> StepBudget:
    """On a device that takes so long for a step of decodes, and so much longer for each prompt token."""
    made = StepBudget(max_num_batched_tokens)
    made.learn(64, 64, decode_s)
    for prompt_tokens in (2048, 600, 1000):
        made.learn(prompt_tokens + 64, 64, decode_s + prompt_tokens * prompt_s)
    return made


def test_steps_with_prompts_are_even() -> None:
    assert learned().prefill_limit(64, 100) == learned().prefill_limit(64, 8192) == budget.EVEN_TOKENS - 64


def test_the_rate_does_not_depend_on_the_steps_it_was_learned_from() -> None:
    small, large = learned(), learned()
    for _ in range(30):
        small.learn(64 + 400, 64, 0.007 + 400 * 20e-6)
        large.learn(64 + 4000, 64, 0.007 + 4000 * 20e-6)
    assert small.prompt_s == pytest.approx(20e-6)
    assert large.prompt_s == pytest.approx(20e-6)


def test_steps_keep_up_with_the_prompts_that_come_in() -> None:
    busy = learned()
    for _ in range(100):
        busy.ended(1024, 128)
    limit = busy.prefill_limit(200, 3000)
    assert 200 * 8 <= limit <= 200 * 8 * budget.KEEP_UP * 9 / 8
    assert busy.prefill_limit(20, 3000) == budget.EVEN_TOKENS - 20, "few streams let few prompts in"
    for _ in range(100):
        busy.ended(50, 500)
    assert busy.prefill_limit(200, 3000) == budget.EVEN_TOKENS - 200, "what was long ago is forgotten"


def test_a_long_queue_makes_long_steps() -> None:
    limits = [learned().prefill_limit(64, outstanding) for outstanding in (1000, 20_000, 40_000, 80_000, 1_000_000)]
    assert limits == sorted(limits)
    assert limits[0] < limits[2] < limits[3]
    longest = 0.007 + limits[-1] * 20e-6
    assert 0.8 * budget.LONGEST_TARGET_S <= longest <= budget.LONGEST_TARGET_S


def test_slow_decodes_make_the_longest_step_longer() -> None:
    slow = learned(decode_s=0.016, prompt_s=40e-6)
    longest_s = 0.016 + slow.prefill_limit(64, 10**6) * 40e-6
    assert 0.8 <= longest_s / (budget.LONGEST_STRETCH * 0.016) <= 1


def test_many_decodes_make_the_longest_step_longer() -> None:
    assert learned(prompt_s=40e-6).prefill_limit(256, 10**6) > 1.5 * learned(prompt_s=40e-6).prefill_limit(64, 10**6)


def test_a_fast_device_s_steps_end_where_more_tokens_gain_nothing() -> None:
    """A small model computes thousands of tokens before the longest step is reached; alone they may have the whole step."""
    fast = learned(decode_s=0.003, prompt_s=1.5e-6)
    assert fast.prefill_limit(64, 10**6) == budget.MOST_MIXED_TOKENS - 64
    assert fast.prefill_limit(0, 50) == 8192


def test_offline_work_has_full_steps() -> None:
    full = StepBudget(8192, even=False)
    full.learn(64, 64, 0.007)
    full.learn(1064, 64, 0.027)
    assert full.prefill_limit(64, 100) == 8192 - 64
    quick = StepBudget(8192, even=False)
    quick.learn(64, 64, 0.003)
    quick.learn(2064, 64, 0.007)
    assert quick.prefill_limit(64, 10**6) == budget.MOST_MIXED_TOKENS - 64, "such steps have CUDA graphs"


def test_a_slow_device_s_steps_hold_the_fewest_tokens() -> None:
    assert learned(decode_s=0.010, prompt_s=2.2e-3).prefill_limit(4, 10**6) == budget.MIN_PREFILL_TOKENS


@given(st.integers(0, 20000))
def test_steps_end_where_graphs_do(num_tokens: int) -> None:
    found = on_grid(num_tokens)
    assert num_tokens * 4 / 5 <= found <= num_tokens
    assert on_grid(found) == found


def test_the_grid() -> None:
    assert [on_grid(n) for n in (500, 700, 1024, 1300, 2047, 2048, 2900, 3072)] == [
        500,
        640,
        1024,
        1280,
        1792,
        2048,
        2560,
        3072,
    ]


def test_only_short_steps_have_a_third_in_flight() -> None:
    made = StepBudget(8192)
    assert made.depth(2) == 2
    made.learn(1, 1, 0.0008)
    assert made.depth(2) == 3
    assert made.depth(1) == 1, "synchronous scheduling stays synchronous"
    for _ in range(20):
        made.learn(64, 64, 0.007)
    assert made.depth(2) == 2


DECODES, CONTEXTS = 3, [*range(0, 32_000, 2000)]


def with_contexts(prompt_s: float, pair_s: float, decode_s: float = 0.008, **options: float) -> StepBudget:
    """On a device that takes so long for a prompt token, and for each token before it, after some long prompts."""
    made = StepBudget(8192, **options)  # type: ignore[arg-type]
    made.learn(DECODES, DECODES, decode_s)
    for start in 8 * CONTEXTS:
        pairs = 1500 * (start + 750)
        made.learn(1500 + DECODES, DECODES, decode_s + 1500 * prompt_s + pairs * pair_s, pairs)
    return made


def step_s(tokens: int, start: int, prompt_s: float, pair_s: float) -> float:
    return 0.008 + tokens * prompt_s + tokens * (start + tokens / 2) * pair_s


def test_the_rate_learns_what_a_context_costs() -> None:
    """The old rate was one number: of 32,000 tokens the first steps were a third as long as the last ones."""
    made = with_contexts(20e-6, 1.5e-9)
    assert made.prompt_s == pytest.approx(20e-6, rel=0.05)
    assert made.pair_s == pytest.approx(1.5e-9, rel=0.05)


def test_steps_of_long_prompts_are_larger() -> None:
    made = with_contexts(20e-6, 0.5e-9)
    limits = [made.prefill_limit(DECODES, 5000, context) for context in (0, budget.CONTEXT - 1, budget.CONTEXT, 30_000)]
    small, large = budget.EVEN_TOKENS - DECODES, budget.LONG_EVEN_TOKENS - DECODES
    assert limits == [small, small, large, large]


def test_a_step_holds_as_many_tokens_of_a_long_prompt_as_of_a_short_one_while_that_is_bearable() -> None:
    made = with_contexts(20e-6, 1.0e-9)
    limits = [made.prefill_limit(DECODES, 10**6, start) for start in CONTEXTS]
    assert limits[0] == limits[CONTEXTS.index(20_000)] > 2000
    assert limits == sorted(limits, reverse=True)
    longest = max(step_s(limit, start, 20e-6, 1.0e-9) for limit, start in zip(limits, CONTEXTS, strict=True))
    assert 0.8 * budget.BEARABLE_S <= longest <= 1.05 * budget.BEARABLE_S
    costly = with_contexts(20e-6, 3.0e-9)
    assert costly.prefill_limit(DECODES, 10**6, 30_000) < limits[-1]


@given(st.floats(2e-6, 40e-6), st.floats(0, 1.5e-9), st.floats(0.03, 0.3), st.integers(0, 32_000), st.booleans())
def test_no_step_is_longer_than_was_asked_for(
    prompt_s: float, pair_s: float, max_itl_s: float, start: int, even: bool
) -> None:
    made = with_contexts(prompt_s, pair_s, max_itl_s=max_itl_s, even=even)
    limit = made.prefill_limit(DECODES, 10**6, start)
    assert limit == budget.MIN_PREFILL_TOKENS or step_s(limit, start, prompt_s, pair_s) <= 1.1 * max_itl_s


@given(st.floats(1e-6, 60e-6), st.lists(st.floats(0.5, 2), max_size=8), st.integers(1, 250), st.integers(0, 10**6))
def test_prompts_of_one_length_have_the_steps_that_they_had_with_one_rate(
    prompt_s: float, factors: list[float], num_decodes: int, outstanding: int
) -> None:
    """What 1,000-token prompts attend to is the same in every step, so their steps do not depend on whether it is counted."""
    plain, counted = StepBudget(8192), StepBudget(8192)
    for made, pairs in ((plain, 0.0), (counted, 1000 * 500.0)):
        made.learn(num_decodes, num_decodes, 0.007)
        for factor in factors:
            made.learn(1000 + num_decodes, num_decodes, 0.007 + 1000 * prompt_s * factor, pairs)
    assert counted.prompt_s + 500 * counted.pair_s == pytest.approx(plain.prompt_s, rel=0.02)
    limits = [made.prefill_limit(num_decodes, outstanding, 500) for made in (plain, counted)]
    beside = budget._grid(
        max(limits) + num_decodes
    )  # steps end on a grid: roundings may have taken either side of a line of it
    assert limits[1] == pytest.approx(limits[0], rel=0.3, abs=beside)


@given(
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 512), st.floats(-1, 10), st.floats(0, 1e9)), max_size=20),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=20),
    st.integers(0, 512),
    st.integers(0, 10**8),
    st.integers(0, 10**6),
)
def test_the_limit_stays_within_the_step(
    steps: list[tuple[int, int, float, float]],
    requests: list[tuple[int, int]],
    num_decodes: int,
    outstanding: int,
    context: int,
) -> None:
    made = StepBudget(2048)
    for num_tokens, decodes, duration_s, pairs in steps:
        made.learn(num_tokens, min(decodes, num_tokens), duration_s, pairs)
    for prompt_tokens, output_tokens in requests:
        made.ended(prompt_tokens, output_tokens)
    limit = made.prefill_limit(num_decodes, outstanding, context)
    assert 0 <= limit <= 2048 - num_decodes
    assert limit >= min(budget.MIN_PREFILL_TOKENS, 2048 - num_decodes)


def waves_of(wave: int, arriving: int) -> list[int]:
    """Tokens of the steps of a long prompt, in so many of which as many prompt tokens come in as there are decodes."""
    made = with_contexts(20e-6, 0.9e-9, wave=wave)
    for _ in range(200):
        made.ended(arriving, DECODES)
    found, context = [], budget.CONTEXT
    while context < 32_000:
        found.append(DECODES + made.prefill_limit(DECODES, 1, context))
        context += found[-1] - DECODES
    return found


def test_behind_a_context_steps_are_whole_waves_of_attention() -> None:
    """132 multiprocessors with 128 rows each, of 32 query heads: 528 tokens fill them, and graphs and products end at 512 of these."""
    for arriving in (100, 600, 700, 800, 1000, 1300):
        steps = waves_of(528, arriving)
        assert set(steps) <= {512, 1024, 1536}
        mean = DECODES + max(budget.KEEP_UP * arriving, budget.EVEN_PROMPT_S / 20e-6)
        assert sum(steps) / len(steps) == pytest.approx(mean * 512 / 528, rel=0.06)
    assert set(waves_of(0, 800)) == {budget.LONG_EVEN_TOKENS}, "where no wave is known"
    assert set(waves_of(64, 800)) == {budget.LONG_EVEN_TOKENS}, "or hardly any"


def test_waves_are_for_steps_with_long_contexts() -> None:
    made = with_contexts(20e-6, 0.9e-9, wave=528)
    assert made.prefill_limit(DECODES, 1, 0) == budget.EVEN_TOKENS - DECODES
    assert made.prefill_limit(DECODES, 1, budget.CONTEXT) in (512 - DECODES, 1024 - DECODES)


def test_the_wave_is_what_workers_say() -> None:
    assert Bench(limits(), 16, 4).core.batching.budget._wave == 528
