"""--kv-transfer-config of the connectors between meshes: what vLLM's keys come to, and what is refused by name."""

from typing import Any

import pytest

from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings.kv_connectors import transfer_of

NIXL: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
P2P: dict[str, Any] = {"kv_connector": "P2pNcclConnector", "kv_role": "kv_producer", "kv_port": "21001"}
EXTRA: dict[str, Any] = {"proxy_ip": "10.0.1.1", "proxy_port": "30001", "http_port": "20005", "send_type": "PUT_ASYNC"}
EXTRA |= {"nccl_num_channels": "16"}


def test_params_of_requests_say_where_pages_are() -> None:
    found = transfer_of(NIXL | {"kv_ip": "10.0.0.2", "kv_port": 0, "kv_connector_extra_config": {"lease_s": 5}})
    assert (found.host, found.port, found.lease_s, found.by_request_id) == ("10.0.0.2", 0, 5.0, False)


def test_request_ids_carry_addresses() -> None:
    """As the reference page starts a producer."""
    found = transfer_of(P2P | {"kv_buffer_size": "1e1", "kv_connector_extra_config": EXTRA})
    assert (found.port, found.buffer_bytes, found.pushes) == (21001, 10, True)
    assert (found.proxy, found.http_address) == ("10.0.1.1:30001", "127.0.0.1:20005")


def test_pages_wait_with_get() -> None:
    assert not transfer_of(P2P | {"kv_port": 1, "kv_connector_extra_config": {"send_type": "GET"}}).pushes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_role": "both"}, "kv_role 'both'"),
        ({"kv_role": None}, "kv_role None"),
        ({"kv_ip": ""}, "kv_ip ''"),
        ({"kv_port": 65536}, "kv_port 65536"),
        ({"kv_port": True}, "kv_port True"),
        ({"kv_buffer_size": "1G"}, "kv_buffer_size '1G'"),
        ({"kv_port": "some"}, "kv_port 'some'"),
        ({"kv_buffer_device": "tpu"}, "kv_buffer_device 'tpu'"),
        ({"kv_connector_extra_config": {"backends": ["UCX"]}}, "backends: pages go over TCP"),
        ({"kv_connector_extra_config": {"lease": 3}}, "lease: unknown"),
        ({"kv_connector_extra_config": {"lease_s": 0}}, "lease_s 0: a number from 1 to 3600"),
        ({"kv_connector_extra_config": {"send_type": "GET"}}, "send_type: unknown"),
    ],
)
def test_what_cannot_be_honoured_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        transfer_of(NIXL | given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_role": "kv_both"}, "kv_role 'kv_both'"),
        ({"kv_port": 0}, "kv_port 0"),
        ({"kv_connector_extra_config": {"send_type": "SEND"}}, "send_type 'SEND'"),
        ({"kv_connector_extra_config": {"proxy_ip": "a"}}, "proxy_port: it goes with proxy_ip"),
        ({"kv_connector_extra_config": EXTRA | {"nccl_num_channels": "64"}}, "nccl_num_channels 64"),
    ],
)
def test_what_request_ids_cannot_say_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        transfer_of(P2P | {"kv_port": 21001} | given)
