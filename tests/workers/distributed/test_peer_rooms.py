"""The rooms of peer memory on a CPU, where they are a rank's own: GPUs have tests/workers/cuda/test_expert_parallel.py."""

from typing import Any

import pytest
import torch
from tiny_models import spec_of

from meshlm.protocol.layers import MoESpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.peer_rooms import PeerRooms


def test_rows_say_in_which_room_they_are_even_if_there_are_none() -> None:
    """A step in which no rank has a token ended the worker."""
    rooms = PeerRooms(0, 2, 4, 8, 2, torch.float32, torch.device("cpu"))
    first, second = rooms.next(second=False), rooms.next(second=True)
    assert first is not second
    for room in (first, second):
        assert rooms.of(room.inbox[:3]) is room
        assert rooms.of(room.inbox[:0]) is room


def test_gpus_that_do_not_reach_each_other_are_refused_by_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: {own, other} != {0, 2})
    moe = MoESpec(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    names = ("vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes: dict[str, Any] = dict.fromkeys((*names, "hidden_size", "head_dim", "max_position_embeddings"), 8)
    group = ExpertGroup(0, 2, "0", torch.device("cuda", 0))
    text = "--all2all-backend peer_memory: GPU 0 does not reach the memory of GPU 2; use allgather_reducescatter"
    with pytest.raises(ProcessFatal, match=text):
        group.share_memory(8, spec_of(architecture="", moe=moe, **sizes), torch.bfloat16)
