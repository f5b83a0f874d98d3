"""The rooms of peer memory on a CPU, where they are a rank's own: GPUs have tests/workers/cuda/test_expert_parallel.py."""

import torch

from meshlm.workers.distributed.peer_rooms import PeerRooms


def test_rows_say_in_which_room_they_are_even_if_there_are_none() -> None:
    """A step in which no rank has a token ended the worker."""
    rooms = PeerRooms(0, 2, 4, 8, 2, torch.float32, torch.device("cpu"))
    first, second = rooms.next(second=False), rooms.next(second=True)
    assert first is not second
    for room in (first, second):
        assert rooms.of(room.inbox[:3]) is room
        assert rooms.of(room.inbox[:0]) is room
