"""Roles of ranks: as a flag, and as a setting of a mesh that runs."""

from typing import Any

import pytest

from meshlm.protocol.config import KVTransferConfig, MeshConfig, ParallelConfig
from meshlm.protocol.config.changing import changed, checked
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import changes, kv_transfer

WRONG = [
    ("prefill:1", "no rank is for decode; without roles each rank does both"),
    ("prefill:0,decode:3", "'prefill:0' is no role with a number; prefill:1,decode:1 would be some"),
    ("prefill:1,decode:1,both:1", "'both:1' is no role with a number; prefill:1,decode:1 would be some"),
    ("prefill:1,decode:1,decode:1", "'decode:1' is no role with a number; prefill:1,decode:1 would be some"),
    ("prefill:1,decode:x", "'decode:x' is no role with a number; prefill:1,decode:1 would be some"),
    ("prefill:1,decode:1", "2 ranks, and --data-parallel-size is 3; give both alike"),
]


def mesh(dp_roles: str) -> MeshConfig:
    return MeshConfig(parallel=ParallelConfig(data_parallel_size=3), kv_transfer=KVTransferConfig(dp_roles=dp_roles))


@pytest.mark.parametrize(("text", "why"), WRONG)
def test_roles_that_cannot_be(text: str, why: str) -> None:
    """The flag and the live setting are refused in the same words."""
    with pytest.raises(UsageError) as refused:
        kv_transfer.settled(mesh(text))
    assert str(refused.value) == f"--dp-roles {text}: {why}"
    with pytest.raises(ValueError, match="dp-roles: ") as refused_later:
        checked(kv_transfer.settled(mesh("prefill:1,decode:2")), {"dp_roles": text})
    assert str(refused_later.value) == f"dp-roles: {why}"


@pytest.mark.parametrize("text", ["prefill:1,decode:2", "decode:2,prefill:1"])
def test_the_first_ranks_are_for_prompts(text: str) -> None:
    assert kv_transfer.settled(mesh(text)).kv_transfer.num_prefill_ranks == 1


def test_roles_change_in_a_mesh_that_has_some() -> None:
    config = kv_transfer.settled(mesh("prefill:1,decode:2"))
    asked: list[dict[str, Any]] = []

    def change(values: dict[str, Any]) -> str:
        asked.append(values)
        return ""

    reply = changes.answer({"values": {"dp_roles": "prefill:2,decode:1"}}, config, change)
    assert reply["settings"]["dp_roles"] == "prefill:2,decode:1"
    assert asked == [{"dp_roles": "prefill:2,decode:1"}]
    assert changed(config, asked[0]).kv_transfer.num_prefill_ranks == 2
    reply = changes.answer({"values": {"dp_roles": "prefill:2,decode:1"}}, mesh(""), change)
    assert reply == {"error": "dp-roles: the ranks of this mesh read no pages of one another; start it with --dp-roles"}
    assert len(asked) == 1


def test_a_process_that_knows_an_earlier_number_of_ranks_takes_the_setting() -> None:
    """Workers and detokenizers are not told of each change of it."""
    after = changed(kv_transfer.settled(mesh("prefill:1,decode:2")), {"dp_roles": "prefill:4,decode:1"})
    assert after.kv_transfer.num_prefill_ranks == 4
