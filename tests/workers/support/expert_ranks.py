"""Members of an expert group in threads of one process, connected by gloo."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from meshlm.protocol.wire.ids import Epoch
from meshlm.workers.distributed.expert_group import ExpertGroup

LIMIT_S = 60
T = TypeVar("T")
G = TypeVar("G")


@contextmanager
def connected(folder: Path, size: int, epoch: int = 1) -> Iterator[list[ExpertGroup]]:
    groups = [ExpertGroup(rank, size, "0", torch.device("cpu")) for rank in range(size)]
    together(groups, lambda group: group.connect(str(folder), Epoch(epoch)))
    yield groups
    for group in groups:
        group.close()


def together(groups: list[G], work: Callable[[G], T]) -> list[T]:
    """What each gives, all at the same time."""
    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(work, group) for group in groups]
        return [future.result(LIMIT_S) for future in futures]
