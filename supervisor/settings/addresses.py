"""Where this node is, for the others: its address, its interface, the ports that it claims, where groups that span nodes meet.

Called by serve.py and llm.py, after node_rules.py has found nothing wrong.
"""

import hashlib
import ipaddress
import os
import socket
from pathlib import Path

import psutil
from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig, NetworkConfig, Node, ParallelConfig
from meshlm.runtime.mesh import tcp
from meshlm.supervisor.errors import StartError, raised_as
from meshlm.supervisor.settings.placement import local_ranks, node_index

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def with_node(config: MeshConfig) -> MeshConfig:
    """The tree with `node` set, where there may be others. StartError when the node's address is none of this host."""
    network = config.network
    if not (network.listen or network.join):
        return config
    ranks, workers = local_ranks(config)
    address = own_address(network.listen, network.join)
    node = Node(
        index=node_index(config),
        id=_node_id(config.run.run_dir),
        address=address,
        interface=interface_of(address),
        head=network.join,
        host=socket.gethostname(),
        ranks=(ranks.start, len(ranks)),
        workers=(workers.start, len(workers)),
    )
    if not network.join:
        port = tcp.parse(network.listen)[1]
        _claim(f"--listen {network.listen}", address, port)
        _claim(f"--listen {network.listen}", address, port + 1)
    return replace(config, node=node, parallel=_with_master(config))


def _with_master(config: MeshConfig) -> ParallelConfig:
    """Sets the address where groups that span nodes meet; StartError when the head cannot listen there."""
    network, parallel = config.network, config.parallel
    parallel = replace(parallel, master_addr=master_address(network, parallel))
    for port in meeting_ports(config) if not network.join else ():
        _claim("--master-addr, --master-port", parallel.master_addr, port)
    return parallel


def master_address(network: NetworkConfig, parallel: ParallelConfig) -> str:
    host = parallel.master_addr or tcp.parse(network.join or network.listen)[0]
    return _resolved("--master-addr", host, parallel.master_port)


def _node_id(run_dir: str) -> str:
    """The same after a restart; another one for another host or run directory."""
    boot = BOOT_ID.read_text("ascii") if BOOT_ID.exists() else socket.gethostname()
    return hashlib.sha256(f"{boot} {socket.gethostname()} {os.path.realpath(run_dir)}".encode()).hexdigest()[:16]


def _resolved(flag: str, host: str, port: int) -> str:
    with raised_as(StartError, OSError, of=f"{flag}: {host}"):
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])


def own_address(listen: str, join: str) -> str:
    """Numeric, of the interface that --listen names or that leads to the head."""
    if listen:
        return _resolved(f"--listen {listen}", *tcp.parse(listen))
    host, port = tcp.parse(join)
    address = _resolved(f"--join {join}", host, port)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with raised_as(StartError, OSError, of=f"--join {join}"):
            probe.connect((address, port))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the interface that has this address; empty when none says so."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    return "lo" if ipaddress.ip_address(address.partition("%")[0]).is_loopback else ""  # all of 127.0.0.0/8 is its


def _claim(flag: str, address: str, port: int) -> None:
    """StartError when the port cannot be bound; it is bound for good a moment later."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with raised_as(StartError, OSError, of=f"{flag}: {address}, port {port}"):
            probe.bind((address, port))


def meeting_ports(config: MeshConfig) -> list[int]:
    """The ports at --master-addr where workers of several nodes meet. Of a settled configuration."""
    parallel = config.parallel
    of_ranks = [parallel.master_port + rank for rank in ranks_over_nodes(parallel)]
    return [*of_ranks, *(parallel.step_ports if steps_over_nodes(config) else ())]


def steps_over_nodes(config: MeshConfig) -> bool:
    """Whether ranks of several nodes step together. Of a settled configuration."""
    _, workers = local_ranks(config)
    num_workers = config.parallel.data_parallel_size * config.parallel.workers_per_rank
    return config.lockstep and 0 < len(workers) < num_workers


def ranks_over_nodes(parallel: ParallelConfig) -> list[int]:
    """Ranks whose groups have workers on several nodes."""
    return [rank for rank in range(parallel.data_parallel_size) if len(parallel.nodes_of(rank)) > 1]
