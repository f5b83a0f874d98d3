"""kv_transfer_params of a request: what they ask for, and what is refused by name."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from meshlm.protocol.config.kv_transfer import PageTransfer
from meshlm.protocol.kv_transfer import MAX_BYTES, transfer_of, transfer_of_id
from meshlm.protocol.remote_pages import TICKET_BYTES

WHERE = {"remote_engine_id": "e", "remote_host": "10.0.0.2", "remote_port": 5600, "remote_block_ids": [1, 2]}


@pytest.mark.parametrize("given", [None, {}, {"do_remote_prefill": False, "do_remote_decode": None, "other": 1}])
def test_nothing_is_asked_for(given: dict[str, Any] | None) -> None:
    assert transfer_of(given, has_connector=False) == ()


def test_a_prompt_is_left_to_another_mesh() -> None:
    """As vLLM's proxies ask for it: the places of the other mesh are null."""
    given = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(WHERE)}
    (found,) = transfer_of(given, has_connector=True)
    assert (found.loads, found.leaves) == (False, True)
    assert json.loads(found.params) == given
    assert found.key_parts(0, 16) == b""


def test_a_prompt_is_loaded_from_another_mesh() -> None:
    (found,) = transfer_of({"do_remote_prefill": True, **WHERE}, has_connector=True)
    assert (found.loads, found.leaves) == (True, False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"do_remote_prefill": 1}, "do_remote_prefill is true or false"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "one of them"),
        ({"do_remote_prefill": True}, "remote_engine_id"),
        ({"do_remote_prefill": True, **WHERE, "remote_host": ""}, "remote_host"),
        ({"do_remote_decode": True, "x": "a" * MAX_BYTES}, "bytes"),
    ],
)
def test_what_cannot_be_honoured_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        transfer_of(given, has_connector=True)


def test_a_server_without_a_connector_says_so() -> None:
    with pytest.raises(ValueError, match="--kv-transfer-config"):
        transfer_of({"do_remote_decode": True}, has_connector=False)


ID = "cmpl-___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_93923d63113b4b338973f24d19d4bf11-0"


@pytest.mark.parametrize(("role", "loads"), [("kv_producer", False), ("kv_consumer", True)])
@pytest.mark.parametrize("pushes", [False, True])
def test_a_request_id_carries_both_addresses(role: Any, loads: bool, pushes: bool) -> None:
    transfer = PageTransfer(
        connector="P2pNcclConnector",
        role=role,
        host="h",
        port=1,
        by_request_id=True,
        pushes=pushes,
        remote_hosts=("10.0.1.2", "10.0.1.3"),
    )
    (found,) = transfer_of_id(ID, transfer)
    params = json.loads(found.params)
    assert (found.loads, found.leaves) == (loads, not loads)
    assert (params["remote_host"], params["remote_port"]) == ("10.0.1.2", 21001)
    assert ("push_host" in params) is pushes
    assert len(bytes.fromhex(params["ticket"])) == TICKET_BYTES
    (bare,) = transfer_of_id(ID.removeprefix("cmpl-"), transfer)
    assert json.loads(bare.params)["ticket"] == params["ticket"]  # both meshes find the same, whatever stands before
    assert transfer_of_id("cmpl-some", transfer) == ()
    with pytest.raises(ValueError, match="remote_hosts"):
        transfer_of_id(ID, replace(transfer, remote_hosts=("h",)))


TICKET = {"ticket": "0a" * TICKET_BYTES}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"remote_host": "10.0.0.3"}, "remote_host"),
        ({"remote_host": {}}, "remote_host"),
        ({"remote_port": "5600"}, "remote_ports"),
        ({"remote_ports": 5}, "remote_ports"),
        ({"remote_ports": [1 << 16]}, "remote_ports"),
        ({"ticket": "zz"}, "ticket"),
        ({"ticket": 5}, "ticket"),
        ({"push_host": "10.0.0.2"}, "push_host"),
    ],
)
def test_pages_of_foreign_hosts_are_not_believed(given: dict[str, Any], said: str) -> None:
    whole = {"do_remote_prefill": True, **WHERE, **TICKET}
    hosts = ("127.0.0.1", "10.0.0.2")
    assert transfer_of(whole, has_connector=True, hosts=hosts)
    with pytest.raises(ValueError, match=said):
        transfer_of(whole | given, has_connector=True, hosts=hosts)
