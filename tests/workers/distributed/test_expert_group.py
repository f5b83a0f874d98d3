"""A group on a GPU whose communicator does not let go; those of gloo are in tests/workers/moe/test_dispatch.py."""

import threading

import torch

from meshlm.workers.distributed.expert_group import ExpertGroup

LIMIT_S = 20


class Communicator:
    """As NCCL's: its abort ends once no CUDA graph has it any more."""

    def __init__(self) -> None:
        self.asked, self.graphs_gone, self.gone = threading.Event(), threading.Event(), threading.Event()

    def abort(self) -> None:
        self.asked.set()
        if self.graphs_gone.wait(LIMIT_S):
            self.gone.set()


def test_leaving_a_group_waits_for_nothing() -> None:
    """The event loop and the stepper leave: neither of them could forget the graphs while it waits for that."""
    group, communicator = ExpertGroup(0, 2, "0", torch.device("cuda", 0)), Communicator()
    group._group = communicator
    group.abort()
    group.close()
    assert communicator.asked.wait(LIMIT_S)
    assert not communicator.gone.is_set()
    communicator.graphs_gone.set()
    assert communicator.gone.wait(LIMIT_S)
