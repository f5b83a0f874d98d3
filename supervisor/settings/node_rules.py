"""Flags of nodes and numbers of processes that do not go together: a table, read before anything starts.

A mesh of one node has no `Node`, and no tcp socket. Called by serve.py and llm.py.
"""

from collections.abc import Container

from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig, ParallelConfig, RunConfig, log_levels
from meshlm.runtime.mesh import keys, tcp
from meshlm.supervisor.settings import addresses
from meshlm.supervisor.settings.placement import local_ranks, settled
from meshlm.supervisor.settings.rules import Rules, check

ANYWHERE = ("0.0.0.0", "::")


def check_nodes(config: MeshConfig) -> None:
    """UsageError unless the flags about nodes and processes fit together. StartError for an address that is not found."""
    check(_nodes(config, python=False))


def check_alone(config: MeshConfig) -> None:
    """UsageError unless all of the mesh is on this node: ranks that are elsewhere would be missing without a word."""
    check(_nodes(replace(config, network=replace(config.network, listen="")), python=True))


def _nodes(given: MeshConfig, *, python: bool) -> Rules:
    """python: it is no command line that says so."""
    of_serve = "`meshlm serve` starts the nodes of a mesh; from Python it has one node"
    yield python and given.network.headless, "headless", of_serve
    yield python and given.network.join, "join", of_serve
    waits = given.run.orphan_grace not in (0, RunConfig().orphan_grace)
    yield waits and python, "orphan_grace", "from Python processes end with the program, so only 0 is true"
    nodes = given.network.listen or given.network.join
    why = "the processes of each node of several end with its supervisor, so only 0 is true"
    yield waits and nodes, f"--orphan-grace {given.run.orphan_grace:g}", why
    yield from _processes(given)
    c = settled(given)
    network, p = c.network, c.parallel
    own_http = network.headless and p.data_parallel_hybrid_lb and p.nnodes == 1
    why = "not together with --headless; each node has HTTP of its own"
    yield own_http, "--data-parallel-hybrid-lb", why
    ranks, workers = local_ranks(c)
    if p.nnodes > 1:
        yield from _groups(p)
    yield from _meeting(c)
    apart = network.headless != bool(network.join)
    yield apart, "--headless and --join tcp://HOST:PORT belong together", ""
    for flag, value in (("--listen", network.listen), ("--join", network.join)):
        if value:
            yield from _endpoint(flag, value, network.key_file)
    nothing = network.headless and not ranks and not workers
    yield nothing, "--headless", "no scheduler or worker is of this node (--data-parallel-size-local)"
    zero = network.headless and p.nnodes > 1 and not p.node_rank
    yield zero, "--node-rank 0 is the head; with --headless it is 1 or more", ""
    if not network.headless:
        why = "the head's is 0; other nodes are started with --headless"
        yield p.node_rank, "--node-rank", why
        outer = ", or --data-parallel-hybrid-lb behind an outer balancer"
        yield p.data_parallel_start_rank, "--data-parallel-start-rank", why + outer
        elsewhere = len(workers) < p.data_parallel_size * p.workers_per_rank and not network.listen
        yield elsewhere and python, "nnodes, data_parallel_size_local", of_serve
        yield elsewhere, "--listen tcp://HOST:PORT is needed where other nodes have some of the ranks", ""
    if network.mesh_port_range:
        yield from _port_range(c, len(ranks) + len(workers))
    if network.listen and not network.headless:
        yield from _http_port(c)


def _processes(c: MeshConfig) -> Rules:
    """The head alone has frontends and detokenizers."""
    try:
        log_levels.parse(c.run.log_level)
    except ValueError as error:
        yield True, f"--log-level {c.run.log_level}", str(error)
    for flag, wanted in (("--frontends", c.server.frontends), ("--detokenizers", c.server.detokenizers)):
        why = "the head has these processes, and a --headless node none; leave it out"
        yield c.network.headless and wanted, f"{flag} {wanted}", why


def _groups(p: ParallelConfig) -> Rules:
    """A group that spans nodes meets at rank 0's store, and --master-addr is of the head."""
    found = _misplaced(p)
    if found is not None:
        num_workers = p.data_parallel_size * p.workers_per_rank
        counts = [count for count in range(2, num_workers + 1) if num_workers % count == 0]
        fit = ", ".join(str(count) for count in counts if _misplaced(replace(p, nnodes=count)) is None) or "1"
        nodes = p.nodes_of(found)
        why = f"the group of rank {found} would span nodes {nodes[0]} to {nodes[-1]}, but one that spans nodes must begin on node 0, "
        yield True, f"--nnodes {p.nnodes}", f"{why}where --master-addr is; with these sizes --nnodes may be {fit}"


def _meeting(c: MeshConfig) -> Rules:
    """Workers of several nodes that meet at --master-addr, which is the head's: so the first rank is there."""
    p, ports = c.parallel, addresses.meeting_ports(c)
    anywhere = bool(ports) and p.master_addr in ANYWHERE
    yield anywhere, f"--master-addr {p.master_addr}", "give the address of the head's private interface"
    last = max(ports, default=0)
    why = f"workers of several nodes meet at this and the next ports, which makes {last}; at most 65535"
    yield last > 65535, f"--master-port {p.master_port}", why
    if not addresses.steps_over_nodes(c):
        return
    why = "rank 0 of ranks that step together is on the head, where --master-addr is"
    ranks, _ = local_ranks(c)
    yield c.network.headless and 0 in ranks, "--data-parallel-start-rank 0", why


def _misplaced(parallel: ParallelConfig) -> int | None:
    """A rank whose group spans nodes and does not begin on the head."""
    groups = {rank: parallel.nodes_of(rank) for rank in range(parallel.data_parallel_size)}
    return next((rank for rank, nodes in groups.items() if len(nodes) > 1 and nodes[0]), None)


def _port_range(c: MeshConfig, num_inner: int) -> Rules:
    """num_inner: this node's schedulers and workers."""
    text = c.network.mesh_port_range
    try:
        first, last = tcp.parse_range(text)
    except tcp.AddressError as error:
        yield True, f"--mesh-port-range {error}", ""
        return
    need = num_inner + (1 if c.network.headless else c.server.detokenizers)
    others = "the node itself" if c.network.headless else "detokenizer"
    why = f"{last + 1 - first} ports, and this node needs {need}, one for each scheduler, worker and {others}"
    yield last + 1 - first < need, f"--mesh-port-range {text}", why


def _http_port(c: MeshConfig) -> Rules:
    """It is held for the mesh, not listened on, until a frontend does: a tcp socket of the mesh could bind it before."""
    server, network, p = c.server, c.network, c.parallel
    address, port = addresses.own_address(network.listen, ""), tcp.parse(network.listen)[1]
    taken: list[tuple[str, str, Container[int]]] = [(f"--listen {network.listen}", address, (port, port + 1))]
    if network.mesh_port_range:
        first, last = tcp.parse_range(network.mesh_port_range)
        taken.append((f"--mesh-port-range {network.mesh_port_range}", address, range(first, last + 1)))
    if meeting := addresses.meeting_ports(c):
        taken.append((f"--master-port {p.master_port}", addresses.master_address(network, p), meeting))
    for flag, where, ports in taken:
        is_taken = server.port in ports and server.address in (*ANYWHERE, where)
        yield is_taken, flag, f"--port {server.port}, where HTTP is served, is one of these ports"


def _endpoint(flag: str, value: str, key_file: str) -> Rules:
    try:
        host, port = tcp.parse(value)
    except tcp.AddressError as error:
        yield True, f"{flag} {error}", ""
        return
    why = "give the address of the private interface, by which other nodes reach this one"
    yield host in ANYWHERE, f"{flag} {value}", why
    yield port == 65535, f"{flag} {value}", "the next port is used too, so at most 65534"
    why = "tcp needs keys; make some with `meshlm keys FILE` and give --key-file FILE on every node"
    yield not key_file, flag, why
    try:
        keys.load(key_file)
    except keys.KeyFileError as error:
        yield True, str(error), ""
