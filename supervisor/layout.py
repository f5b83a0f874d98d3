"""Which processes are of which node, and where a node is: from the flags, before anything starts.

Called by serve.py, llm.py and io.py. A mesh of one node has no `Node`, and no tcp socket.
"""

import hashlib
import os
import socket
from pathlib import Path

import msgspec

from meshlm.protocol.config import MeshConfig, Node, ParallelConfig
from meshlm.protocol.ids import Identity, Role
from meshlm.runtime import keys, tcp
from meshlm.supervisor.errors import StartError, UsageError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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


def identities(config: MeshConfig) -> list[Identity]:
    """All processes of this node, in the order of starting: slow ones first."""
    ranks, workers = places(config)
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
    """UsageError unless the flags about nodes fit together."""
    network, parallel = config.network, config.parallel
    ranks, workers = places(config)
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
        raise UsageError(f"{flag}: the head's is 0; other nodes are started with --headless")
    elif len(workers) < parallel.data_parallel_size * parallel.workers_per_rank and not network.listen:
        raise UsageError("--listen tcp://HOST:PORT is needed where other nodes have some of the ranks")
    if network.mesh_port_range:
        try:
            tcp.parse_range(network.mesh_port_range)
        except tcp.AddressError as error:
            raise UsageError(f"--mesh-port-range {error}") from None


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
        head=network.join,
        host=socket.gethostname(),
        ranks=(ranks.start, len(ranks)),
        workers=(workers.start, len(workers)),
    )
    if not network.join:
        port = tcp.parse(network.listen)[1]
        _claim(network.listen, address, port)
        _claim(network.listen, address, port + 1)
    parallel = config.parallel
    if not parallel.master_addr:
        master = _resolved(*tcp.parse(network.join or network.listen))
        parallel = msgspec.structs.replace(parallel, master_addr=master)
    return msgspec.structs.replace(config, node=node, parallel=parallel)


def index(config: MeshConfig) -> int:
    """Which node this is; its supervisor's number."""
    if not config.network.headless:
        return 0
    return config.parallel.node_rank or config.parallel.data_parallel_start_rank + 1


def _node_id(run_dir: str) -> str:
    """The same after a restart; another one for another host or run directory."""
    boot = BOOT_ID.read_text("ascii") if BOOT_ID.exists() else socket.gethostname()
    return hashlib.sha256(f"{boot} {socket.gethostname()} {os.path.realpath(run_dir)}".encode()).hexdigest()[:16]


def _resolved(host: str, port: int) -> str:
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise StartError(f"{host}: {error.strerror or error}") from None


def _address(listen: str, join: str) -> str:
    """Numeric, of the interface that --listen names or that leads to the head."""
    if listen:
        return _resolved(*tcp.parse(listen))
    host, port = tcp.parse(join)
    address = _resolved(host, port)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise StartError(f"--join {join}: {os.strerror(error.errno or 0)}") from None
        return str(probe.getsockname()[0])


def _claim(listen: str, address: str, port: int) -> None:
    """StartError when the port cannot be bound; it is bound for good a moment later."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise StartError(f"--listen {listen}: port {port}: {os.strerror(error.errno or 0)}") from None
