"""Whether a copy is worth it."""

from meshlm.scheduler_proc.budget import StepBudget
from meshlm.scheduler_proc.connectors.rates import FORGIVENESS, Rates


def budget(prompt_s: float, pair_s: float = 0.0) -> StepBudget:
    made = StepBudget(1024)
    made.prompt_s, made.pair_s = prompt_s, pair_s
    return made


def test_what_is_not_known_is_tried() -> None:
    rates = Rates()
    assert rates.is_worth({"store": 1000}, 0, 16, budget(1e-6))
    rates.learn("store", 10, 10.0)
    assert rates.is_worth({"store": 1000}, 0, 16, budget(0.0)), "what computing takes is not known"
    assert not rates.is_worth({"store": 1000}, 0, 16, budget(1e-6))
    assert rates.is_worth({"rank": 1000}, 0, 16, budget(1e-6))


def test_the_quicker_way_is_taken() -> None:
    rates = Rates()
    rates.learn("store", 100, 1.0)  # 10 ms a page
    assert rates.is_worth({"store": 10}, 0, 160, budget(1e-3))
    assert not rates.is_worth({"store": 10}, 0, 80, budget(1e-3))
    assert rates.is_worth({"store": 10}, 10_000, 10_080, budget(1e-3, 1e-6)), "tokens behind a long context take longer"
    assert not rates.is_worth({"store": 10, "rank": 1}, 0, 80, budget(1e-3))


def test_what_was_too_slow_is_tried_again_some_time() -> None:
    rates = Rates()
    rates.learn("store", 1, 1.0)
    refused = 0
    while not rates.is_worth({"store": 1}, 0, 16, budget(0.5 / 16)):
        refused += 1
    assert FORGIVENESS**refused < 0.5 <= FORGIVENESS ** (refused - 1)


def test_a_copy_of_nothing_teaches_nothing() -> None:
    rates = Rates()
    rates.learn("store", 0, 5.0)
    rates.learn("store", 5, 0.0)
    assert rates.is_worth({"store": 1000}, 0, 16, budget(1e-9))
