"""Lays processes out over nodes, and says where a node is: from the flags, before anything starts.

Called by serve.py, llm.py and io.py. A mesh of one node has no `Node`, and no tcp socket.
"""

import hashlib
import ipaddress
import os
import socket
from collections.abc import Container
from pathlib import Path

import msgspec
import psutil

from meshlm.protocol.config import MeshConfig, NetworkConfig, Node, ParallelConfig, log_levels
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.mesh import keys, tcp
from meshlm.supervisor.errors import StartError, UsageError
from meshlm.supervisor.settings import balancing

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CORES_EACH = 8  # of this machine for a rank, a frontend and a detokenizer


def places(config: MeshConfig) -> tuple[range, range]:
    """The ranks whose schedulers, and the workers, that run on this node. UsageError when the flags contradict."""
    parallel = config.parallel
    per_rank = parallel.workers_per_rank
    if parallel.nnodes > 1:
        return _even_places(parallel, per_rank)
    first, total = parallel.data_parallel_start_rank, parallel.data_parallel_size
    count = parallel.data_parallel_size_local
    if first >= total:
        raise UsageError(f"--data-parallel-start-rank {first}: below --data-parallel-size {total}")
    if count is None:
        count = total - first
    if first + count > total:
        raise UsageError(
            f"--data-parallel-size-local {count}: with --data-parallel-start-rank {first} at most {total - first}, "
            f"as --data-parallel-size is {total}"
        )
    return range(first, first + count), range(first * per_rank, (first + count) * per_rank)


def has_others(config: MeshConfig) -> bool:
    """Whether other nodes have some of the mesh's workers, as the flags say: `MeshConfig.node` is set later."""
    parallel = balancing.own_part(config.parallel)
    _, here = places(msgspec.structs.replace(config, parallel=parallel))
    return len(here) < parallel.data_parallel_size * parallel.workers_per_rank


def _even_places(parallel: ParallelConfig, per_rank: int) -> tuple[range, range]:
    """--nnodes: all workers evenly over the nodes; a scheduler is where its first worker is."""
    if parallel.data_parallel_size_local is not None or parallel.data_parallel_start_rank:
        raise UsageError("--nnodes: not together with --data-parallel-size-local and --data-parallel-start-rank")
    num_workers = parallel.data_parallel_size * per_rank
    if num_workers % parallel.nnodes:
        raise UsageError(
            f"--nnodes {parallel.nnodes}: {num_workers} workers cannot be spread evenly over so many nodes"
        )
    if parallel.node_rank >= parallel.nnodes:
        raise UsageError(f"--node-rank {parallel.node_rank}: below --nnodes {parallel.nnodes}")
    here = num_workers // parallel.nnodes
    workers = range(parallel.node_rank * here, (parallel.node_rank + 1) * here)
    return range(-(-workers.start // per_rank), -(-workers.stop // per_rank)), workers


def _check_groups(parallel: ParallelConfig) -> None:
    """A group that spans nodes meets at rank 0's store, and --master-addr is of the head."""
    found = _misplaced(parallel)
    if found is None:
        return
    num_workers = parallel.data_parallel_size * parallel.workers_per_rank
    fit = [
        str(count)
        for count in range(2, num_workers + 1)
        if num_workers % count == 0 and _misplaced(msgspec.structs.replace(parallel, nnodes=count)) is None
    ]
    raise UsageError(
        f"--nnodes {parallel.nnodes}: the group of rank {found} would span nodes {parallel.nodes_of(found)[0]} to "
        f"{parallel.nodes_of(found)[-1]}, but one that spans nodes must begin on node 0, where --master-addr is; "
        f"with these sizes --nnodes may be {', '.join(fit) or '1'}"
    )


def _misplaced(parallel: ParallelConfig) -> int | None:
    """A rank whose group spans nodes and does not begin on the head."""
    groups = {rank: parallel.nodes_of(rank) for rank in range(parallel.data_parallel_size)}
    return next((rank for rank, nodes in groups.items() if len(nodes) > 1 and nodes[0]), None)


def _spanning(parallel: ParallelConfig) -> list[int]:
    """Ranks whose groups have workers on several nodes."""
    return [rank for rank in range(parallel.data_parallel_size) if len(parallel.nodes_of(rank)) > 1]


def settled(config: MeshConfig) -> MeshConfig:
    """The same with the ranks that this mesh runs, where an outer balancer is over several, and all numbers of processes.

    Where the flags leave them open there are as many frontends and detokenizers as ranks, if there are cores for them.

    By its CPU time a detokenizer keeps up with about 50,000 tokens a second, which one GPU gives with a small model.
    """
    parallel, server = balancing.own_part(config.parallel), config.server
    usual = max(1, min(parallel.data_parallel_size, len(os.sched_getaffinity(0)) // CORES_EACH))
    counts = {"frontends": server.frontends or usual, "detokenizers": server.detokenizers or usual}
    return msgspec.structs.replace(config, parallel=parallel, server=msgspec.structs.replace(server, **counts))


def identities(config: MeshConfig) -> list[Identity]:
    """All processes of this node, in the order of starting: slow ones first. Of a settled configuration."""
    renders = config.resolved is not None and config.resolved.renders_only
    ranks, workers = (range(0), range(0)) if renders else places(config)
    rest = 0 if config.network.headless else 1
    numbers = {
        Role.WORKER: workers,
        Role.COORDINATOR: range(rest),
        Role.SCHEDULER: ranks,
        Role.DETOKENIZER: range(rest * config.server.detokenizers),
        Role.FRONTEND: range(rest * config.server.frontends),
    }
    return [Identity(role, index) for role, indices in numbers.items() for index in indices]


def check(config: MeshConfig) -> None:
    """UsageError unless the flags about nodes and processes fit together."""
    try:
        log_levels.parse(config.run.log_level)
    except ValueError as error:
        raise UsageError(f"--log-level {config.run.log_level}: {error}") from None
    _check_head_only(config)
    config = settled(config)
    network, parallel = config.network, config.parallel
    if network.headless and parallel.data_parallel_hybrid_lb and parallel.nnodes == 1:
        raise UsageError("--data-parallel-hybrid-lb: not together with --headless; each node has HTTP of its own")
    ranks, workers = places(config)
    if parallel.nnodes > 1:
        _check_groups(parallel)
        _check_master(parallel)
    if network.headless != bool(network.join):
        raise UsageError("--headless and --join tcp://HOST:PORT belong together")
    for flag, value in (("--listen", network.listen), ("--join", network.join)):
        if value:
            _check_endpoint(flag, value, network.key_file)
    if network.headless:
        if not ranks and not workers:
            raise UsageError("--headless: no scheduler or worker is of this node (--data-parallel-size-local)")
        if parallel.nnodes > 1 and not parallel.node_rank:
            raise UsageError("--node-rank 0 is the head; with --headless it is 1 or more")
    elif parallel.data_parallel_start_rank or parallel.node_rank:
        flag = "--node-rank" if parallel.node_rank else "--data-parallel-start-rank"
        other = "" if parallel.node_rank else ", or --data-parallel-hybrid-lb behind an outer balancer"
        raise UsageError(f"{flag}: the head's is 0; other nodes are started with --headless{other}")
    elif len(workers) < parallel.data_parallel_size * parallel.workers_per_rank and not network.listen:
        raise _RanksElsewhere("--listen tcp://HOST:PORT is needed where other nodes have some of the ranks")
    if network.mesh_port_range:
        _check_port_range(config, len(ranks) + len(workers))
    if network.listen and not network.headless:
        _check_http_port(config)


def _check_head_only(config: MeshConfig) -> None:
    """The head alone has frontends and detokenizers. UsageError for numbers of them on another node."""
    if not config.network.headless:
        return
    for flag, wanted in (("--frontends", config.server.frontends), ("--detokenizers", config.server.detokenizers)):
        if wanted:
            raise UsageError(f"{flag} {wanted}: the head has these processes, and a --headless node none; leave it out")


def check_alone(config: MeshConfig) -> None:
    """UsageError unless all of the mesh is on this node: ranks that are elsewhere would be missing without a word."""
    for flag, value in (("headless", config.network.headless), ("join", config.network.join)):
        if value:
            raise UsageError(f"{flag}: `meshlm serve` starts the nodes of a mesh; from Python it has one node")
    try:
        check(msgspec.structs.replace(config, network=msgspec.structs.replace(config.network, listen="")))
    except _RanksElsewhere:
        raise UsageError(
            "nnodes, data_parallel_size_local: `meshlm serve` starts the nodes of a mesh; from Python it has one node"
        ) from None


class _RanksElsewhere(UsageError):
    """Other nodes have some of the ranks, and cannot join."""


def _check_master(parallel: ParallelConfig) -> None:
    if parallel.master_addr in ("0.0.0.0", "::"):
        raise UsageError(f"--master-addr {parallel.master_addr}: give the address of the head's private interface")
    last = parallel.master_port + max(_spanning(parallel), default=0)
    if last > 65535:
        raise UsageError(
            f"--master-port {parallel.master_port}: rank R uses this + R, which makes {last}; at most 65535"
        )


def _check_port_range(config: MeshConfig, num_inner: int) -> None:
    """`num_inner`: this node's schedulers and workers."""
    text = config.network.mesh_port_range
    try:
        first, last = tcp.parse_range(text)
    except tcp.AddressError as error:
        raise UsageError(f"--mesh-port-range {error}") from None
    need = num_inner + (1 if config.network.headless else config.server.detokenizers)
    if last + 1 - first < need:
        others = "the node itself" if config.network.headless else "detokenizer"
        raise UsageError(
            f"--mesh-port-range {text}: {last + 1 - first} ports, and this node needs {need}, one for each scheduler, "
            f"worker and {others}"
        )


def _check_http_port(config: MeshConfig) -> None:
    """It is held for the mesh, not listened on, until a frontend does: a tcp socket of the mesh could bind it before. StartError when
    the address of --listen or --master-addr is not found."""
    server, network, parallel = config.server, config.network, config.parallel
    address, port = _address(network.listen, ""), tcp.parse(network.listen)[1]
    taken: list[tuple[str, str, Container[int]]] = [(f"--listen {network.listen}", address, (port, port + 1))]
    if network.mesh_port_range:
        first, last = tcp.parse_range(network.mesh_port_range)
        taken.append((f"--mesh-port-range {network.mesh_port_range}", address, range(first, last + 1)))
    if spanning := _spanning(parallel):
        meeting = [parallel.master_port + rank for rank in spanning]
        taken.append((f"--master-port {parallel.master_port}", _master_address(network, parallel), meeting))
    for flag, where, ports in taken:
        if server.port in ports and server.address in ("0.0.0.0", "::", where):
            raise UsageError(f"{flag}: --port {server.port}, where HTTP is served, is one of these ports")


def _check_endpoint(flag: str, value: str, key_file: str) -> None:
    try:
        host, port = tcp.parse(value)
    except tcp.AddressError as error:
        raise UsageError(f"{flag} {error}") from None
    if host in ("0.0.0.0", "::"):
        raise UsageError(
            f"{flag} {value}: give the address of the private interface, by which other nodes reach this one"
        )
    if port == 65535:
        raise UsageError(f"{flag} {value}: the next port is used too, so at most 65534")
    if not key_file:
        raise UsageError(
            f"{flag}: tcp needs keys; make some with `meshlm keys FILE` and give --key-file FILE on every node"
        )
    try:
        keys.load(key_file)
    except keys.KeyFileError as error:
        raise UsageError(str(error)) from None


def with_node(config: MeshConfig) -> MeshConfig:
    """The tree with `node` set, where there may be others. StartError when the node's address is none of this host."""
    network = config.network
    if not (network.listen or network.join):
        return config
    ranks, workers = places(config)
    address = _address(network.listen, network.join)
    node = Node(
        index=index(config),
        id=_node_id(config.run.run_dir),
        address=address,
        interface=_interface(address),
        head=network.join,
        host=socket.gethostname(),
        ranks=(ranks.start, len(ranks)),
        workers=(workers.start, len(workers)),
    )
    if not network.join:
        port = tcp.parse(network.listen)[1]
        _claim(f"--listen {network.listen}", address, port)
        _claim(f"--listen {network.listen}", address, port + 1)
    return msgspec.structs.replace(config, node=node, parallel=_with_master(config))


def _with_master(config: MeshConfig) -> ParallelConfig:
    """Sets the address where groups that span nodes meet; StartError when the head cannot listen there."""
    network, parallel = config.network, config.parallel
    parallel = msgspec.structs.replace(parallel, master_addr=_master_address(network, parallel))
    for rank in _spanning(parallel) if not network.join else ():
        _claim("--master-addr, --master-port", parallel.master_addr, parallel.master_port + rank)
    return parallel


def _master_address(network: NetworkConfig, parallel: ParallelConfig) -> str:
    host = parallel.master_addr or tcp.parse(network.join or network.listen)[0]
    return _resolved("--master-addr", host, parallel.master_port)


def index(config: MeshConfig) -> int:
    """The number of this node, which is its supervisor's."""
    if not config.network.headless:
        return 0
    return config.parallel.node_rank or config.parallel.data_parallel_start_rank + 1


def _node_id(run_dir: str) -> str:
    """The same after a restart; another one for another host or run directory."""
    boot = BOOT_ID.read_text("ascii") if BOOT_ID.exists() else socket.gethostname()
    return hashlib.sha256(f"{boot} {socket.gethostname()} {os.path.realpath(run_dir)}".encode()).hexdigest()[:16]


def _resolved(flag: str, host: str, port: int) -> str:
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise StartError(f"{flag}: {host}: {error.strerror or error}") from None


def _address(listen: str, join: str) -> str:
    """Numeric, of the interface that --listen names or that leads to the head."""
    if listen:
        return _resolved(f"--listen {listen}", *tcp.parse(listen))
    host, port = tcp.parse(join)
    address = _resolved(f"--join {join}", host, port)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise StartError(f"--join {join}: {os.strerror(error.errno or 0)}") from None
        return str(probe.getsockname()[0])


def _interface(address: str) -> str:
    """The name of the interface that has this address; empty when none says so."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    return "lo" if ipaddress.ip_address(address.partition("%")[0]).is_loopback else ""  # all of 127.0.0.0/8 is its


def _claim(flag: str, address: str, port: int) -> None:
    """StartError when the port cannot be bound; it is bound for good a moment later."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise StartError(f"{flag}: {address}, port {port}: {os.strerror(error.errno or 0)}") from None
