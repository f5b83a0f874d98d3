"""The step budget learns from what steps took."""

import pytest
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


@given(
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 512), st.floats(-1, 10)), max_size=20),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=20),
    st.integers(0, 512),
    st.integers(0, 10**8),
)
def test_the_limit_stays_within_the_step(
    steps: list[tuple[int, int, float]], requests: list[tuple[int, int]], num_decodes: int, outstanding: int
) -> None:
    made = StepBudget(2048)
    for num_tokens, decodes, duration_s in steps:
        made.learn(num_tokens, min(decodes, num_tokens), duration_s)
    for prompt_tokens, output_tokens in requests:
        made.ended(prompt_tokens, output_tokens)
    limit = made.prefill_limit(num_decodes, outstanding)
    assert 0 <= limit <= 2048 - num_decodes
    assert limit >= min(budget.MIN_PREFILL_TOKENS, 2048 - num_decodes)
