"""Offers of a key are counted until there are enough, of as many keys as may be tracked."""

from store_bench import key

from meshlm.store.admission import Admission


def test_all_are_taken_by_default() -> None:
    for threshold in (0, 1):
        assert Admission(threshold).takes(key(1))


def test_a_key_is_taken_with_the_offer_that_is_enough_and_counted_anew_then() -> None:
    admission = Admission(3)
    assert [admission.takes(key(1)) for _ in range(6)] == [False, False, True] * 2


def test_what_was_offered_longest_ago_is_forgotten() -> None:
    admission = Admission(2, max_tracked=2)
    assert not any(admission.takes(key(number)) for number in (1, 2, 3))
    assert admission.takes(key(2))
    assert not admission.takes(key(1))
