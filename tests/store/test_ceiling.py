"""The ceiling of the hit rate is what a store without any bound would have reached, within the sketch's error."""

import random

import pytest
from store_bench import key

from meshlm.store.ceiling import Ceiling


@pytest.mark.parametrize("num_keys", [1, 30, 1000, 50_000])
def test_it_counts_first_lookups(num_keys: int) -> None:
    ceiling, exact = Ceiling(), 0
    draws, seen = random.Random(num_keys), set[int]()
    for _ in range(2 * num_keys):
        number = draws.randrange(num_keys)
        if draws.random() < 0.3:
            ceiling.offered(key(number))
        else:
            exact += number in seen
            ceiling.looked_up(key(number))
        seen.add(number)
    assert ceiling.hit_rate == pytest.approx(exact / ceiling.num_lookups, abs=0.02)


def test_nothing_looked_up_is_no_rate() -> None:
    ceiling = Ceiling()
    assert ceiling.hit_rate == 0.0
    ceiling.offered(key(1))
    ceiling.looked_up(key(1))
    assert ceiling.hit_rate == 1.0
