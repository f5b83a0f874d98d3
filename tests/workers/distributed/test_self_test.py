"""What is told of sums that are not what they must be."""

from collections.abc import Iterator

import torch

from meshlm.kernels.self_test import Result
from meshlm.workers.distributed.symmetric import result, wrong_results

ONES = torch.ones(2, 3)


def test_wrong_results_are_named_and_all_are_launched() -> None:
    """A rank that stopped at the first would keep the others waiting."""
    launched: list[str] = []

    def results() -> Iterator[Result]:
        for name, found in (("right", ONES), ("off by one", ONES + 1), ("none", None), ("right too", ONES)):
            launched.append(name)
            yield result(name, found, ONES)

    assert wrong_results(results()) == "off by one, none"
    assert launched == ["right", "off by one", "none", "right too"]
    assert wrong_results(iter([result("right", ONES, ONES)])) == ""


def test_nothing_and_what_is_no_number_are_wrong_and_near_is_right() -> None:
    assert result("none", None, ONES).wrong()
    assert result("far", ONES + 0.1, ONES, near=0.03).wrong()
    assert not result("near", ONES + 0.02, ONES, near=0.03).wrong()
    assert result("no number", ONES * float("nan"), ONES, near=0.03).wrong()
