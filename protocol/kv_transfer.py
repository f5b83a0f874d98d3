"""The extra of a request whose KV comes from, or goes to, another mesh: `kv_transfer_params`, as vLLM's proxies and llm-d send them."""

import hashlib
import json
import re
from typing import Any

from meshlm.protocol.config.kv_transfer import PageTransfer
from meshlm.protocol.extra_kind import ExtraKind

NAME = "kv_transfer_params"  # the field of requests and answers
MAX_BYTES = 1 << 20
FLAGS = ("do_remote_prefill", "do_remote_decode")
WHERE = ("remote_engine_id", "remote_host", "remote_port")  # of the mesh that has a prompt's KV


class KVTransfer(ExtraKind, frozen=True, tag="kv_transfer"):
    """`params` are the client's, JSON. They change no key: the KV of the same tokens is the same wherever it was computed."""

    params: bytes
    loads: bool = False  # do_remote_prefill: its prompt's KV lies in the mesh that params name
    leaves: bool = False  # do_remote_decode: its prompt's KV is leased to whoever gets the answer's params

    @property
    def num_bytes(self) -> int:
        return len(self.params)

    @property
    def kv_params(self) -> bytes:
        return self.params

    @property
    def brings_kv(self) -> bool:
        return self.loads

    @property
    def leaves_kv(self) -> bool:
        return self.leaves


def transfer_of(
    given: dict[str, Any] | None, *, has_connector: bool, hosts: tuple[str, ...] | None = None
) -> tuple[KVTransfer, ...]:
    """The extra of a request with this field; none where neither flag is set. hosts: whose pages may be read; None: a
    plug-in judges what is given. ValueError where it cannot be honoured."""
    if given is None:
        return ()
    for flag in FLAGS:
        if not isinstance(given.get(flag, False), bool | None):
            raise ValueError(f"{flag} is true or false")
    loads, leaves = (bool(given.get(flag)) for flag in FLAGS)
    if not (loads or leaves):
        return ()
    if not has_connector:
        raise ValueError("this server moves no KV (--kv-transfer-config)")
    if loads and leaves:
        raise ValueError(f"{' and '.join(FLAGS)} are true, and one of them may be")
    if loads and (missing := [name for name in WHERE if not given.get(name)]):
        raise ValueError(f"{missing[0]} says where the prompt's KV is, and is missing")
    if hosts is not None:
        _check(given, hosts, loads=loads)
    params = json.dumps(given).encode()
    if len(params) > MAX_BYTES:
        raise ValueError(f"at most {MAX_BYTES} bytes")
    return (KVTransfer(params, loads, leaves),)


def _check(given: dict[str, Any], hosts: tuple[str, ...], *, loads: bool) -> None:
    """ValueError for what names no mesh. A page of a foreign host would be in everybody's prefix cache."""
    if name := next((name for name in ("push_host", "push_port") if name in given), ""):
        raise ValueError(f"{name}: pages are not sent by this connector")
    if not loads:
        return
    if given["remote_host"] not in hosts:
        raise ValueError(
            "remote_host: not one of those that the server reads from (remote_hosts in --kv-transfer-config)"
        )
    ports = given.get("remote_ports", [given["remote_port"]])
    if not (isinstance(ports, list) and all(type(port) is int and 0 < port < 1 << 16 for port in ports)):
        raise ValueError("remote_ports: ports are expected")
    if not (isinstance(ticket := given.get("ticket"), str) and re.fullmatch("[0-9a-f]{64}", ticket)):
        raise ValueError("ticket: 64 hexadecimal digits are expected")


# As vLLM's P2P proxies name requests: both addresses, and what tells requests apart.
_ADDRESSES = re.compile(r"___prefill_addr_([^_]+):(\d{1,5})___decode_addr_([^_]+):(\d{1,5})_")


def transfer_of_id(request_id: str, transfer: PageTransfer) -> tuple[KVTransfer, ...]:
    """The extra of a request whose id carries the addresses of both meshes; none where it does not. Its digest is the ticket.
    ValueError where the other one is a host that the server does not know."""
    found = _ADDRESSES.search(request_id)
    if found is None:
        return ()
    prefill_host, prefill_port, decode_host, decode_port = found.groups()
    other = prefill_host if transfer.role == "kv_consumer" else decode_host
    if other not in transfer.remote_hosts or max(int(prefill_port), int(decode_port)) >= 1 << 16:
        raise ValueError(
            f"{other[:64]} is not one of those that the server knows (remote_hosts in --kv-transfer-config)"
        )
    params: dict[str, Any] = {"ticket": hashlib.sha256(request_id[found.start() :].encode()).hexdigest()}
    params |= {"remote_host": prefill_host, "remote_port": int(prefill_port)}
    if transfer.pushes:
        params |= {"push_host": decode_host, "push_port": int(decode_port)}
    loads = transfer.role == "kv_consumer"
    return (KVTransfer(json.dumps(params).encode(), loads, not loads),)
