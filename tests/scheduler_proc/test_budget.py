"""The step budget learns from what steps took."""

from hypothesis import given
from hypothesis import strategies as st

from meshlm.scheduler_proc import budget
from meshlm.scheduler_proc.budget import StepBudget, on_grid


def test_without_decodes_or_measurements_all_room_is_for_prompts() -> None:
    fresh = StepBudget(8192)
    assert fresh.prefill_limit(0, 5) == 8192
    assert fresh.prefill_limit(100, 5) == 8092


def test_a_step_beside_decodes_is_a_few_decode_steps_long() -> None:
    learned = StepBudget(8192)
    learned.learn(64, 64, 0.007)
    learned.learn(2000, 0, 0.05)  # 40,000 tokens a second
    assert learned.prefill_limit(64, 2) == on_grid(int(40000 * budget.STRETCH * 0.007)) - 64


def test_a_long_queue_makes_long_steps() -> None:
    learned = StepBudget(8192)
    learned.learn(64, 64, 0.004)
    learned.learn(2000, 0, 0.05)
    assert learned.prefill_limit(64, 50) == on_grid(int(40000 * budget.LONGEST_TARGET_S)) - 64


def test_slow_decodes_make_the_longest_step_longer() -> None:
    learned = StepBudget(8192)
    learned.learn(256, 256, 0.016)
    learned.learn(2000, 0, 0.05)
    assert learned.target_step_s(256, 200) == budget.LONGEST_STRETCH * 0.016
    assert learned.prefill_limit(256, 10) == on_grid(int(40000 * budget.STRETCH * 0.016)) - 256


def test_many_decodes_make_the_longest_step_longer() -> None:
    learned = StepBudget(8192)
    learned.learn(256, 256, 0.004)
    learned.learn(2000, 0, 0.05)
    assert learned.target_step_s(256, 200) == 2 * budget.LONGEST_TARGET_S
    assert learned.prefill_limit(256, 200) == budget.MOST_MIXED_TOKENS - 256


def test_a_fast_device_s_steps_end_where_more_tokens_gain_nothing() -> None:
    """A small model computes thousands of tokens before the target is reached; alone they may have the whole step."""
    learned = StepBudget(8192)
    learned.learn(64, 64, 0.003)
    learned.learn(8192, 0, 0.0175)
    assert learned.prefill_limit(64, 2) == learned.prefill_limit(64, 50) == budget.MOST_MIXED_TOKENS - 64
    assert learned.prefill_limit(0, 50) == 8192


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
    learned = StepBudget(8192)
    assert learned.depth(2) == 2
    learned.learn(1, 1, 0.0008)
    assert learned.depth(2) == 3
    assert learned.depth(1) == 1, "synchronous scheduling stays synchronous"
    for _ in range(20):
        learned.learn(64, 64, 0.007)
    assert learned.depth(2) == 2


@given(
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 512), st.floats(-1, 10)), max_size=20),
    st.integers(0, 512),
    st.integers(0, 5000),
)
def test_the_limit_stays_within_the_step(
    steps: list[tuple[int, int, float]], num_decodes: int, num_waiting: int
) -> None:
    learned = StepBudget(2048)
    for num_tokens, decodes, duration_s in steps:
        learned.learn(num_tokens, min(decodes, num_tokens), duration_s)
    limit = learned.prefill_limit(num_decodes, num_waiting)
    assert 0 <= limit <= 2048 - num_decodes
    assert limit >= min(budget.MIN_PREFILL_TOKENS, 2048 - num_decodes)
