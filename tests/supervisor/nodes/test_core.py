"""Which processes are of which node; who may join; what flags must fit. All without processes."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshlm.protocol.config import ExpertConfig, MeshConfig, NetworkConfig, ParallelConfig, ServerConfig
from meshlm.protocol.edges.control import NodeJoin, NodeRefused, NodeReport, NodeWelcome, ProcessReport, StandbyReport
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.supervisor.cli import main, serve
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.nodes import core
from meshlm.supervisor.nodes.core import Nodes
from meshlm.supervisor.settings import addresses, node_rules, placement

FACTS = {"the version": "1", "the model": "abc (m)", "--dtype": "float32"}


def config(network: dict[str, object] | None = None, **parallel: Any) -> MeshConfig:
    tree = {"parallel": parallel, "network": network or {}}
    return msgspec.convert(tree, MeshConfig)


def places(**parallel: Any) -> tuple[list[int], list[int]]:
    ranks, workers = placement.local_ranks(config(**parallel))
    return list(ranks), list(workers)


def test_one_node_has_all() -> None:
    assert places(data_parallel_size=2, tensor_parallel_size=2) == ([0, 1], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("cores", "ranks", "said", "found"),
    [
        (2, 4, {}, (1, 1)),
        (64, 1, {}, (1, 1)),
        (64, 4, {}, (4, 4)),
        (24, 8, {}, (3, 3)),
        (64, 4, {"frontends": 2}, (2, 4)),
    ],
)
def test_as_many_text_processes_as_ranks_where_there_are_cores(
    cores: int, ranks: int, said: dict[str, int], found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    tree = {"parallel": {"data_parallel_size": ranks}, "server": said}
    made = placement.settled(msgspec.convert(tree, MeshConfig))
    assert (made.server.frontends, made.server.detokenizers) == found
    roles = [identity.role for identity in placement.identities(made)]
    assert (roles.count(Role.FRONTEND), roles.count(Role.DETOKENIZER)) == found


def test_ranks_of_a_node() -> None:
    assert places(data_parallel_size=4, tensor_parallel_size=2, data_parallel_start_rank=2) == ([2, 3], [4, 5, 6, 7])
    head = {"data_parallel_size": 4, "data_parallel_size_local": 0}
    assert places(**head) == ([], [])


def test_groups_that_span_nodes() -> None:
    """Every worker is on one node, every scheduler where its first worker is."""
    for size, per_rank, nnodes in ((1, 4, 2), (1, 8, 4), (2, 2, 4), (3, 2, 3), (4, 1, 2), (3, 4, 6)):
        flags = {"data_parallel_size": size, "tensor_parallel_size": per_rank, "nnodes": nnodes}
        nodes = [places(**flags, node_rank=node) for node in range(nnodes)]
        assert [worker for _, workers in nodes for worker in workers] == list(range(size * per_rank))
        assert [rank for ranks, _ in nodes for rank in ranks] == list(range(size))
        for ranks, workers in nodes:
            assert all(rank * per_rank in workers for rank in ranks)


def test_which_nodes_a_group_spans() -> None:
    parallel = ParallelConfig(data_parallel_size=3, tensor_parallel_size=4, nnodes=2)
    assert [list(parallel.nodes_of(rank)) for rank in range(3)] == [[0], [0, 1], [1]]
    assert list(ParallelConfig(pipeline_parallel_size=4, nnodes=4).nodes_of(0)) == [0, 1, 2, 3]
    assert list(ParallelConfig(data_parallel_size=5).nodes_of(4)) == [0]


def test_the_private_interface_has_a_name() -> None:
    """gloo and NCCL take a name where everything else takes an address."""
    assert addresses.interface_of("127.0.0.1") == addresses.interface_of("127.0.0.3") == "lo"
    assert addresses.interface_of("203.0.113.77") == "", "none of this host"


LISTEN: dict[str, object] = {"listen": "tcp://127.0.0.1:5600"}
JOIN: dict[str, object] = {"join": "tcp://127.0.0.1:5600", "headless": True}


@pytest.mark.parametrize(
    ("network", "parallel", "text"),
    [
        ({}, {"data_parallel_size": 2, "data_parallel_size_local": 3}, "--data-parallel-size-local 3"),
        ({}, {"data_parallel_start_rank": 1}, "--data-parallel-start-rank 1: below --data-parallel-size 1"),
        ({}, {"data_parallel_size": 2, "data_parallel_start_rank": 1}, "the head's is 0"),
        ({}, {"data_parallel_size": 2, "data_parallel_size_local": 1}, "--listen"),
        ({}, {"nnodes": 2, "tensor_parallel_size": 3}, "--nnodes 2: 3 workers"),
        ({}, {"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, "--node-rank 2"),
        ({}, {"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size_local": 1}, "--nnodes: not together"),
        (
            {},
            {"nnodes": 4, "tensor_parallel_size": 2, "data_parallel_size": 2},
            "--nnodes 4: the group of rank 1 would",
        ),
        ({}, {"nnodes": 4, "tensor_parallel_size": 2, "data_parallel_size": 2}, "--nnodes may be 2"),
        ({}, {"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "0.0.0.0"}, "--master-addr 0.0.0.0"),
        ({}, {"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 3, "master_port": 65535}, "makes 65536"),
        ({"headless": True}, {}, "--headless and --join"),
        ({"join": "tcp://a:1"}, {}, "--headless and --join"),
        ({"listen": "10.0.0.1:5600"}, {}, "--listen '10.0.0.1:5600' is not tcp://HOST:PORT"),
        ({"listen": "ipc:///tmp/x"}, {}, "--listen"),
        ({"listen": "tcp://0.0.0.0:5600"}, {}, "private interface"),
        ({"listen": "tcp://127.0.0.1:65535"}, {}, "65534"),
        (LISTEN, {}, "tcp needs keys"),
        (JOIN, {}, "tcp needs keys"),
        ({**LISTEN, "key_file": "/nowhere/at/all"}, {}, "--key-file /nowhere/at/all: No such file"),
        ({"mesh_port_range": "9-5"}, {}, "--mesh-port-range"),
        ({"mesh_port_range": "5700-5703"}, {"data_parallel_size": 2}, "--mesh-port-range 5700-5703: 4 ports, and this"),
    ],
)
def test_flags_that_do_not_fit(network: dict[str, object], parallel: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError) as refused:
        node_rules.check_nodes(config(network, **parallel))
    assert text in str(refused.value)


STEPS = {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("headless", "parallel", "text"),
    [
        (False, {"data_parallel_size_local": 1}, ""),
        (False, {"data_parallel_size_local": 0}, ""),
        (True, {"data_parallel_start_rank": 1}, ""),
        (True, {}, ""),
        (
            True,
            {"data_parallel_size_local": 1},
            "--data-parallel-start-rank 0: rank 0 of ranks that step together is on the head",
        ),
        (
            False,
            {"data_parallel_size_local": 1, "master_port": 65533},
            "--master-port 65533: workers of .* makes 65536",
        ),
        (False, {"data_parallel_size_local": 1, "master_addr": "0.0.0.0"}, "--master-addr 0.0.0.0: give the address"),
        (False, {"data_parallel_size_local": 1, "master_port": 7998}, "--master-port 7998: --port 8001, where HTTP"),
    ],
)
def test_ranks_of_several_nodes_that_step_together_meet_on_the_head(
    headless: bool, parallel: dict[str, object], text: str, tmp_path: Path
) -> None:
    key_file = str(tmp_path / "key")
    assert main.run(["keys", key_file]) == 0
    network = {**(JOIN if headless else LISTEN), "headless": headless, "key_file": key_file}
    made = config(network, data_parallel_size=2, **parallel)
    server = ServerConfig(port=8001)
    made = msgspec.structs.replace(made, server=server, experts=msgspec.convert(STEPS, ExpertConfig))
    if not text:
        node_rules.check_nodes(made)
        return
    with pytest.raises(UsageError, match=text):
        node_rules.check_nodes(made)


@pytest.mark.parametrize(
    ("host", "network", "parallel", "text"),
    [
        ("0.0.0.0", {}, {}, ""),
        ("127.0.0.1", {"mesh_port_range": "7990-8010"}, {}, "--mesh-port-range 7990-8010"),
        ("127.0.0.1", {"listen": "tcp://127.0.0.1:8000"}, {}, "--listen tcp://127.0.0.1:8000"),
        ("127.0.0.1", {"listen": "tcp://localhost:7999"}, {}, "--listen tcp://localhost:7999"),
        ("127.0.0.1", {"listen": "tcp://127.0.0.2:7999", "mesh_port_range": "7990-8010"}, {}, ""),
        ("0.0.0.0", {"listen": "tcp://127.0.0.2:7999"}, {}, "--listen tcp://127.0.0.2:7999"),
        ("127.0.0.1", {}, {"master_port": 8000}, "--master-port 8000"),
        ("127.0.0.1", {}, {"master_port": 8000, "master_addr": "127.0.0.2"}, ""),
        ("0.0.0.0", {}, {"master_port": 8000, "master_addr": "127.0.0.2"}, "--master-port 8000"),
    ],
)
def test_a_port_of_the_mesh_is_not_the_http_servers(
    host: str, network: dict[str, object], parallel: dict[str, object], text: str, tmp_path: Path
) -> None:
    """A socket of the mesh bound it before the frontend listened, which then failed."""
    key_file = str(tmp_path / "key")
    assert main.run(["keys", key_file]) == 0
    made = config({**LISTEN, "key_file": key_file, **network}, nnodes=2, tensor_parallel_size=2, **parallel)
    made = msgspec.structs.replace(made, server=ServerConfig(host=host, port=8000))
    if not text:
        node_rules.check_nodes(made)
        return
    with pytest.raises(UsageError, match=f"{text}: --port 8000, where HTTP is served"):
        node_rules.check_nodes(made)


@pytest.mark.parametrize("flag", ["frontends", "detokenizers"])
def test_a_node_without_http_has_no_processes_of_it(flag: str, tmp_path: Path) -> None:
    """The numbers were taken there, and no such process started."""
    key_file = str(tmp_path / "key")
    assert main.run(["keys", key_file]) == 0
    node = config({**JOIN, "key_file": key_file}, data_parallel_size=2, data_parallel_start_rank=1)
    node_rules.check_nodes(node)
    server = ServerConfig(**{flag: 2})  # type: ignore[arg-type]  # a number for either
    with pytest.raises(UsageError, match=f"--{flag} 2: the head has these processes"):
        node_rules.check_nodes(msgspec.structs.replace(node, server=server))
    assert (
        serve.of_the_head(msgspec.structs.replace(node, server=ServerConfig(port=9000, grpc=True))) == "--port, --grpc"
    )
    assert serve.of_the_head(MeshConfig(server=ServerConfig(port=9000))) == ""


def test_from_python_a_mesh_has_one_node() -> None:
    """LLM starts all of it or nothing: two of four ranks would serve without a word about the others."""
    node_rules.check_alone(config(data_parallel_size=2, tensor_parallel_size=2))
    cases: list[tuple[dict[str, object], dict[str, object], str]] = [
        ({}, {"data_parallel_size": 4, "data_parallel_size_local": 2}, "data_parallel_size_local"),
        (LISTEN, {"data_parallel_size": 2, "nnodes": 2}, "nnodes"),
        (JOIN, {"data_parallel_size": 2}, "headless"),
    ]
    for network, parallel, text in cases:
        with pytest.raises(UsageError, match=f"{text}.*from Python it has one node"):
            node_rules.check_alone(config(network, **parallel))


def test_every_setting_of_a_node_can_differ_or_is_compared() -> None:
    """A new flag is compared unless it is marked: nobody has to think of it."""
    assert MeshConfig().parallel == ParallelConfig()
    assert NetworkConfig().peer_timeout == 3.0
    different = core.differences({"--x": "1", "the model": "a (one)"}, {"--x": "2", "the model": "a (two)"})
    assert different == "--x is 1 on the head and 2 on the node"
    assert "--y is unknown on the head" in core.differences({}, {"--y": "1"})


SECOND, THIRD = Identity(Role.SUPERVISOR, 2), Identity(Role.SUPERVISOR, 3)


def joins(first: int, count: int = 1, facts: dict[str, str] = FACTS) -> NodeJoin:
    return NodeJoin("host-b", (first, count), (first, count), facts)


def test_joining() -> None:
    nodes = Nodes((0, 1), (0, 1), FACTS)
    assert nodes.join(SECOND, joins(1)) == NodeWelcome()
    assert nodes.join(SECOND, joins(1)) == NodeWelcome(), "again, in a new session"
    for clash, text in ((joins(0), "rank 0 runs on the head"), (joins(1, 2), "rank 1 runs on host-b")):
        refused = nodes.join(THIRD, clash)
        assert isinstance(refused, NodeRefused)
        assert text in refused.message
    refused = nodes.join(THIRD, joins(2, facts={**FACTS, "--dtype": "bfloat16", "the version": "2"}))
    assert isinstance(refused, NodeRefused)
    assert "--dtype is float32 on the head and bfloat16 on the node" in refused.message
    assert "the version is 1 on the head and 2 on the node" in refused.message
    assert set(nodes.joined) == {SECOND}


def test_what_is_on_no_node() -> None:
    nodes = Nodes((0, 1), (0, 2), FACTS)
    assert nodes.missing(4, 8) == "ranks 1 to 3"
    nodes.join(SECOND, NodeJoin("host-b", (2, 1), (4, 2), FACTS))
    assert nodes.missing(4, 8) == "ranks 1, 3"
    assert nodes.missing(1, 4) == "workers 2 to 3", "of a group that spans nodes"
    nodes.join(THIRD, NodeJoin("host-c", (3, 1), (6, 2), FACTS))
    assert nodes.missing(4, 8) == "rank 1"
    assert nodes.lost(THIRD) is not None
    assert nodes.lost(THIRD) is None, "it is lost once"
    assert nodes.missing(4, 8) == "ranks 1, 3"
    nodes.join(THIRD, NodeJoin("host-c", (3, 1), (6, 2), FACTS))
    nodes.join(Identity(Role.SUPERVISOR, 4), NodeJoin("host-d", (1, 1), (2, 2), FACTS))
    assert nodes.missing(4, 8) == ""


def test_a_lost_node_leaves_its_ranks_to_others() -> None:
    nodes = Nodes((0, 1), (0, 1), FACTS)
    nodes.join(SECOND, joins(1))
    assert nodes.lost(SECOND) is not None
    assert nodes.lost(THIRD) is None
    assert nodes.join(THIRD, joins(1)) == NodeWelcome()
    assert isinstance(nodes.join(SECOND, joins(1)), NodeRefused)


def test_a_node_speaks_of_its_own_processes_alone() -> None:
    nodes = Nodes((0, 1), (0, 1), FACTS)
    nodes.join(SECOND, joins(1))
    own, others = Identity(Role.SCHEDULER, 1), Identity(Role.SCHEDULER, 0)
    rows = tuple(
        ProcessReport(name, Incarnation(1), 7, "ready", 0.0, 0) for name in (own, others, Identity(Role.FRONTEND))
    )
    standby = StandbyReport(Role.SCHEDULER, 8, "standby", 0.0)
    nodes.report(SECOND, NodeReport(rows, (standby,)))
    nodes.report(THIRD, NodeReport(rows))
    assert [row.identity for row in nodes.joined[SECOND].processes] == [own]
    assert nodes.joined[SECOND].standbys == (standby,)
    assert nodes.is_of(SECOND, own)
    assert not nodes.is_of(SECOND, others)
    assert not nodes.is_of(THIRD, own)


def test_keys_are_private_and_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mesh.key"
    before = os.umask(0)
    try:
        assert main.run(["keys", str(file)]) == 0
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    content = file.read_text()
    assert json.loads(content)["secret_key"] not in capsys.readouterr().out
    assert main.run(["keys", str(file)]) == 2
    assert file.read_text() == content
    assert "is not overwritten" in capsys.readouterr().err
    assert main.run(["keys", str(tmp_path / "none" / "x")]) == 1


def test_other_weights_of_the_same_shape_are_another_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(1 << 20))
    before = list(core._samples(tmp_path))
    file.write_bytes(bytes(1 << 19) + b"\1" + bytes((1 << 19) - 1))
    assert list(core._samples(tmp_path)) != before
