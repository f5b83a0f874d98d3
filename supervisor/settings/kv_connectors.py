"""The connectors between meshes that --kv-transfer-config may name, with vLLM's names and keys. Called by kv_transfer.py.

`NixlConnector`: a proxy passes kv_transfer_params from the answer of the one mesh to the request of the other. `P2pNcclConnector`: the
request's id carries both addresses. Pages go over TCP here, whatever the names say.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from meshlm.protocol.config.kv_transfer import PageTransfer
from meshlm.supervisor.settings.rules import Rules, check

BY_PARAMS, BY_REQUEST_ID = "NixlConnector", "P2pNcclConnector"
NAMES = (BY_PARAMS, BY_REQUEST_ID)
ROLES = ("kv_producer", "kv_consumer", "kv_both")
SEND_TYPES = ("PUT_ASYNC", "PUT", "GET")
HOST, PORT, BUFFER_BYTES = "127.0.0.1", 14579, 1e9  # vLLM's port and buffer
# Keys of kv_connector_extra_config: the kind of the value, and for numbers from where to where it may be.
OPTIONS: dict[str, tuple[type, float, float]] = {
    "lease_s": (float, 1, 3600),
    "remote_hosts": (list, 0, 0),
    "send_type": (str, 0, 0),
    "proxy_ip": (str, 0, 0),
    "proxy_port": (int, 1, 65535),
    "http_ip": (str, 0, 0),
    "http_port": (int, 1, 65535),
    "mem_pool_size_gb": (float, 0, 1 << 20),  # beside kv_buffer_size
    "nccl_num_channels": (int, 1, 32),  # of NCCL, which has no part in it
}
ONLY_BY_REQUEST_ID = tuple(name for name in OPTIONS if name not in ("lease_s", "remote_hosts"))
REFUSED = dict.fromkeys(("backends", "enable_permute_local_kv"), "pages go over TCP; leave it out")
_TEXTS = tuple(name for name, (kind, _, _) in OPTIONS.items() if kind in (str, list))
_KINDS = {float: "a number", int: "a whole number", str: "a text", list: "a list of hosts"}


def transfer_of(given: Mapping[str, Any]) -> PageTransfer:
    """The connector that a settled --kv-transfer-config names. UsageError names the key that cannot be honoured."""
    options = _with_numbers(given.get("kv_connector_extra_config") or {}, OPTIONS)
    given = _with_numbers(given, ("kv_port", "kv_buffer_size")) | {"kv_connector_extra_config": options}
    check(_rules(given))
    by_request_id = given["kv_connector"] == BY_REQUEST_ID
    proxy = f"{options['proxy_ip']}:{options['proxy_port']}" if "proxy_port" in options else ""
    host = given.get("kv_ip", HOST)
    buffer_bytes = int(given.get("kv_buffer_size", BUFFER_BYTES) + options.get("mem_pool_size_gb", 0) * 2**30)
    return PageTransfer(
        connector=given["kv_connector"],
        role=given["kv_role"],
        host=host,
        port=given.get("kv_port", PORT),
        remote_hosts=(host, *options.get("remote_hosts", ())),
        buffer_bytes=buffer_bytes if by_request_id else 0,
        by_request_id=by_request_id,
        pushes=by_request_id and options.get("send_type", SEND_TYPES[0]) != "GET",
        lease_s=float(options.get("lease_s", 30.0)),
        proxy=proxy,
        http_address=f"{options.get('http_ip', host)}:{options['http_port']}" if proxy else "",
    )


def _rules(given: Mapping[str, Any]) -> Rules:
    name = given["kv_connector"]
    role = given.get("kv_role")
    roles = ROLES[:2] if name == BY_REQUEST_ID else ROLES
    yield role not in roles, f"kv_role {role!r}", f"{', '.join(roles)} are the roles of {name}"
    host, port, size = given.get("kv_ip", HOST), given.get("kv_port", PORT), given.get("kv_buffer_size", BUFFER_BYTES)
    yield not (isinstance(host, str) and host), f"kv_ip {host!r}", "an address of this host is expected"
    yield not _is_number(port, int, 0, 65535), f"kv_port {port!r}", "a port is expected; 0: any"
    yield not _is_number(size, float, 1, math.inf), f"kv_buffer_size {size!r}", "bytes are expected"
    fixed = "0 is no port that a request's id can carry"
    yield name == BY_REQUEST_ID and port == 0, "kv_port 0", fixed
    device = given.get("kv_buffer_device", "cpu")
    yield device not in ("cpu", "cuda"), f"kv_buffer_device {device!r}", "cpu is expected"
    options = given.get("kv_connector_extra_config") or {}
    for key, value in options.items():
        yield key in REFUSED, f"kv_connector_extra_config: {key}", REFUSED.get(key, "")
        known = ", ".join(one for one in OPTIONS if name == BY_REQUEST_ID or one not in ONLY_BY_REQUEST_ID)
        foreign = key not in OPTIONS or (name != BY_REQUEST_ID and key in ONLY_BY_REQUEST_ID)
        yield foreign, f"kv_connector_extra_config: {key}", f"unknown; {known} are the keys of {name}"
        kind, least, most = OPTIONS[key]
        wrong = not _is_of(kind, value, least, most)
        span = "" if kind in (str, list) else f" from {least:g} to {most:g}"
        yield wrong, f"kv_connector_extra_config: {key} {value!r}", f"{_KINDS[kind]}{span} is expected"
    send = options.get("send_type", SEND_TYPES[0])
    yield send not in SEND_TYPES, f"kv_connector_extra_config: send_type {send!r}", f"{', '.join(SEND_TYPES)}"
    asked = [key for key in ("proxy_ip", "proxy_port", "http_port") if key in options]
    missing = next((key for key in ("proxy_ip", "proxy_port", "http_port") if key not in options), "")
    yield asked and missing, f"kv_connector_extra_config: {missing}", f"it goes with {', '.join(asked)}"


def _with_numbers(given: Mapping[str, Any], numbers: Collection[str]) -> dict[str, Any]:
    """The same, with numbers in the place of texts of numbers, which vLLM's pages have for these keys."""
    return {key: _number(value) if key in numbers and key not in _TEXTS else value for key, value in given.items()}


def _number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        found = float(value)
    except ValueError:
        return value
    return int(found) if found.is_integer() else found


def _is_of(kind: type, value: Any, least: float, most: float) -> bool:
    if kind is list:
        return isinstance(value, list) and all(isinstance(host, str) and host for host in value)
    return isinstance(value, str) if kind is str else _is_number(value, kind, least, most)


def _is_number(value: Any, kind: type, least: float, most: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return False
    return least <= value <= most
