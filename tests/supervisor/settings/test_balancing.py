"""The flags that say who balances."""

import msgspec
import pytest
from tiny_models import resolved_of, spec_of

from meshlm.protocol.config import Resolved
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.group.scaling import Scaling
from meshlm.supervisor.settings import flags, node_rules
from meshlm.supervisor.settings.placement import identities, own_part


def on_gpus() -> Resolved:
    heads = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
    return resolved_of(spec_of(hidden_size=64, intermediate_size=96, **heads), device="cuda", dtype="bfloat16")


def part(**values: object) -> tuple[int, int | None, bool]:
    parallel = own_part(flags.build(values, None).parallel)
    return parallel.data_parallel_size, parallel.data_parallel_rank, parallel.data_parallel_external_lb


def test_an_outer_balancer_has_one_mesh_for_each_rank() -> None:
    assert part(data_parallel_size=4) == (4, None, False)
    assert part(data_parallel_size=4, data_parallel_rank=3) == (1, 3, True)
    assert part(data_parallel_size=4, data_parallel_rank=0, data_parallel_external_lb=True) == (1, 0, True)


def test_a_node_behind_an_outer_balancer_has_its_own_ranks() -> None:
    node = {"data_parallel_size": 8, "data_parallel_hybrid_lb": True, "data_parallel_size_local": 4}
    assert part(**node) == (4, 0, False)
    assert part(**node, data_parallel_start_rank=4) == (4, 4, False)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"data_parallel_hybrid_lb": True}, "--data-parallel-hybrid-lb: needs --data-parallel-size-local"),
        (
            {
                "data_parallel_hybrid_lb": True,
                "data_parallel_size": 4,
                "data_parallel_size_local": 2,
                "data_parallel_start_rank": 3,
            },
            "--data-parallel-start-rank 3: .* ranks up to 4, and --data-parallel-size 4 has 0 to 3",
        ),
        ({"data_parallel_external_lb": True}, "--data-parallel-external-lb: needs --data-parallel-rank"),
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, "--data-parallel-rank 2: with --data-parallel-size 2"),
        ({"data_parallel_rank": 0, "data_parallel_hybrid_lb": True}, "--data-parallel-hybrid-lb: not together"),
    ],
)
def test_what_cannot_be_names_the_flag(values: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        part(**values)


def test_flags_of_each_mode_are_no_flags_of_several_nodes() -> None:
    """No part has to --listen for the others, whichever of the ranks it has."""
    for first in (0, 4):
        node = {"data_parallel_hybrid_lb": True, "data_parallel_size_local": 4, "data_parallel_start_rank": first}
        node_rules.check_nodes(flags.build({"data_parallel_size": 8, **node}, None))
    node_rules.check_nodes(flags.build({"data_parallel_size": 8, "data_parallel_rank": 5}, None))
    with pytest.raises(UsageError, match="--data-parallel-hybrid-lb: not together with --headless"):
        node_rules.check_nodes(
            flags.build({**node, "data_parallel_size": 8, "headless": True, "join": "tcp://a:1"}, None)
        )


def test_one_rank_behind_a_balancer_is_not_scaled() -> None:
    config = flags.build({"data_parallel_external_lb": True, "data_parallel_rank": 0}, None)
    with pytest.raises(UsageError, match="outer balancer"):
        Scaling(identities).begin(config, 2, 1.0)


def test_more_ranks_than_this_host_has_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started: two workers on one GPU would take each other's memory."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = msgspec.structs.replace(flags.build({}, None), resolved=on_gpus())
    scaling = Scaling(identities)
    with pytest.raises(UsageError, match="--data-parallel-size 3 needs 3 GPUs, one per worker; this host shows 2"):
        scaling.begin(config, 3, 1.0)
    assert scaling.doing == ""
    assert scaling.begin(config, 2, 1.0) is not None


def test_a_change_names_whole_ranks() -> None:
    config = flags.build({"data_parallel_size": 2, "tensor_parallel_size": 2}, None)
    scaling = Scaling(identities)
    change = scaling.begin(config, 3, 1.0)
    assert change is not None
    assert sorted(map(str, change.added)) == ["scheduler/2", "worker/4", "worker/5"]
    assert (scaling.doing, change.removed) == ("adding rank 2", ())
    assert scaling.end("") is config
    change = scaling.begin(change.config, 1, 1.0)
    assert change is not None
    assert sorted(map(str, change.removed)) == [
        "scheduler/1",
        "scheduler/2",
        "worker/2",
        "worker/3",
        "worker/4",
        "worker/5",
    ]
    assert sorted(map(str, scaling.of_rank(1))) == ["scheduler/1", "worker/2", "worker/3"]
    assert scaling.of_rank(3) == ()
    assert scaling.begin(change.config, 1, 1.0) is None
