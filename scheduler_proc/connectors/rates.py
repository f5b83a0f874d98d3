"""How long copies of pages take, learned from those that were made, against computing the same. Pure; owned by transfers.py."""

from collections.abc import Mapping

from meshlm.scheduler_proc.budget import StepBudget

SMOOTHING = 0.3
FORGIVENESS = 0.9  # what was too slow is taken for so much quicker each time that it is not tried: it is, some time


class Rates:
    """Seconds a page, by who has the other end. They outlive sessions."""

    def __init__(self) -> None:
        self._page_s: dict[str, float] = {}

    def learn(self, kind: str, num_pages: int, seconds: float) -> None:
        """So many pages were copied in this time."""
        if num_pages and seconds > 0:
            page_s = seconds / num_pages
            before = self._page_s.get(kind, page_s)
            self._page_s[kind] = before + SMOOTHING * (page_s - before)

    def is_worth(self, num_pages: Mapping[str, int], begin: int, end: int, budget: StepBudget) -> bool:
        """Whether to copy these pages, by kind, takes less time than to compute the tokens from `begin` to `end`. What is not known yet
        is tried."""
        copy_s = sum(count * self._page_s.get(kind, 0.0) for kind, count in num_pages.items())
        compute_s = (end - begin) * (budget.prompt_s + budget.pair_s * (begin + end) / 2)
        if not compute_s or copy_s < compute_s:
            return True
        for kind in num_pages:
            if kind in self._page_s:
                self._page_s[kind] *= FORGIVENESS
        return False
