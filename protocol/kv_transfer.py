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


def transfer_of(given: dict[str, Any] | None, *, has_connector: bool) -> tuple[KVTransfer, ...]:
    """The extra of a request with this field; none where neither flag is set. ValueError where it cannot be honoured."""
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
    params = json.dumps(given).encode()
    if len(params) > MAX_BYTES:
        raise ValueError(f"at most {MAX_BYTES} bytes")
    return (KVTransfer(params, loads, leaves),)


# As vLLM's P2P proxies name requests: both addresses, and what tells requests apart.
_ADDRESSES = re.compile(r"___prefill_addr_([^_]+):(\d{1,5})___decode_addr_([^_]+):(\d{1,5})_")


def transfer_of_id(request_id: str, transfer: PageTransfer) -> tuple[KVTransfer, ...]:
    """The extra of a request whose id carries the addresses of both meshes; none where it does not. Its digest is the ticket."""
    found = _ADDRESSES.search(request_id)
    if found is None:
        return ()
    prefill_host, prefill_port, decode_host, decode_port = found.groups()
    params: dict[str, Any] = {"ticket": hashlib.sha256(request_id[found.start() :].encode()).hexdigest()}
    params |= {"remote_host": prefill_host, "remote_port": int(prefill_port)}
    if transfer.pushes:
        params |= {"push_host": decode_host, "push_port": int(decode_port)}
    loads = transfer.role == "kv_consumer"
    return (KVTransfer(json.dumps(params).encode(), loads, not loads),)
