"""Ranks of a group as processes, where kernels run in the interpreter and peer memory is shared memory."""

import multiprocessing
from collections.abc import Callable
from typing import Any

from triton_interpreter import hasten

CONTEXT = multiprocessing.get_context("spawn")


def answers_of(size: int, run_rank: Callable[..., None], *arguments: Any, limit_s: float = 90) -> dict[int, Any]:
    """What each rank said: run_rank(rank, *arguments, answers) puts (rank, answer)."""
    answers = CONTEXT.Queue()
    ranks = [CONTEXT.Process(target=_run, args=(run_rank, rank, *arguments, answers)) for rank in range(size)]
    for process in ranks:
        process.start()
    try:
        return dict(answers.get(timeout=limit_s) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _run(run_rank: Callable[..., None], *arguments: Any) -> None:
    hasten()
    run_rank(*arguments)
