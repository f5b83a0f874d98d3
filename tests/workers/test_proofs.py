"""What is told of sums that are not what they must be."""

from collections.abc import Iterator

import torch

from meshlm.workers.parallel.proofs import Result, first_wrong

ONES = torch.ones(2, 3)


def test_the_first_wrong_result_is_named_and_nothing_after_it_is_launched() -> None:
    launched: list[str] = []

    def results() -> Iterator[Result]:
        for name, found in (("right", ONES), ("off by one", ONES + 1), ("none", None)):
            launched.append(name)
            yield Result(name, found, ONES)

    assert first_wrong(results()) == "off by one"
    assert launched == ["right", "off by one"]
    assert first_wrong(iter([Result("right", ONES, ONES)])) == ""


def test_nothing_and_what_is_no_number_are_wrong_and_near_is_right() -> None:
    assert Result("none", None, ONES).wrong()
    assert Result("far", ONES + 0.1, ONES, near=0.03).wrong()
    assert not Result("near", ONES + 0.02, ONES, near=0.03).wrong()
    assert Result("no number", ONES * float("nan"), ONES, near=0.03).wrong()
