"""The flags of a store and of connectors: what they come to, or one line that names what cannot be honoured."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_models import spec_of

from meshlm.protocol.config import CacheConfig, KVTransferConfig, MeshConfig, NetworkConfig, ParallelConfig
from meshlm.protocol.config.kv_transfer import PageTransfer
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime import platforms
from meshlm.runtime.process import host_memory
from meshlm.supervisor.api.arguments import settings_of
from meshlm.supervisor.cli import main
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flag_rules, flags, kv_transfer, placement, rules

GIB = 1 << 30
OFFLOADING: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
STORE = KVTransferConfig(kv_offloading_size=0.5)
BETWEEN = KVTransferConfig(transfer=PageTransfer(connector="NixlConnector", role="kv_both", host="127.0.0.1", port=0))


def settled(given: Any = None, **fields: Any) -> KVTransferConfig:
    text = given if isinstance(given, str) else "" if given is None else json.dumps(given)
    return kv_transfer.settled(MeshConfig(kv_transfer=KVTransferConfig(kv_transfer_config=text, **fields))).kv_transfer


def check(config: MeshConfig, *, pools: bool = False) -> None:
    rules.check(kv_transfer.rules(config, flag_rules.Facts(spec_of(), platforms.named("cpu")), pools=pools))


def test_nothing_moves_without_a_word_of_it() -> None:
    found = settled()
    assert found == KVTransferConfig()
    assert [found.has_store, found.shares_pages, found.moves] == [False] * 3
    check(MeshConfig())


def test_vllms_spelling_of_the_store_is_the_flags() -> None:
    options = {"cpu_bytes_to_use": GIB, "store_threshold": 2, "max_tracker_size": 100, "spec_name": "CPUOffloadingSpec"}
    found = settled({**OFFLOADING, "kv_connector_extra_config": options})
    assert found.kv_offloading_size == 1.0
    assert found.has_store
    assert found.connectors == ()
    assert json.loads(found.connector_options) == options
    beside = settled({**OFFLOADING, "kv_connector_extra_config": {"store_threshold": 2}}, kv_offloading_size=3.0)
    assert beside.kv_offloading_size == 3.0
    assert json.loads(beside.connector_options) == {"store_threshold": 2}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("{", "--kv-transfer-config {: "),
        ("[]", "a JSON object is expected"),
        (
            {"kv_connector": "MooncakeConnector"},
            'kv_connector "MooncakeConnector": no such connector; there are OffloadingConnector, NixlConnector, P2pNcclConnector',
        ),
        ({}, "kv_connector null: no such connector"),
        ({**OFFLOADING, "kv_rol": "kv_both"}, "kv_rol: unknown; kv_role is one"),
        ({**OFFLOADING, "kv_load_failure_policy": "retry"}, 'kv_load_failure_policy "retry": recompute or fail'),
        ({**OFFLOADING, "kv_connector_extra_config": []}, "kv_connector_extra_config: a JSON object is expected"),
        (
            {**OFFLOADING, "kv_role": "kv_producer"},
            'kv_role "kv_producer": OffloadingConnector saves and loads; kv_both',
        ),
        (OFFLOADING, "cpu_bytes_to_use, or --kv-offloading-size, is missing"),
    ],
)
def test_connectors_that_cannot_be_are_refused_by_their_key(given: Any, text: str) -> None:
    with pytest.raises(UsageError) as found:
        settled(given)
    assert text in str(found.value)
    assert str(found.value).startswith("--kv-transfer-config")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use 0: a number from 1 on"),
        ({"cpu_bytes_to_use": "1G"}, 'cpu_bytes_to_use "1G": a number from 1 on'),
        ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use true: a number from 1 on"),
        ({"cpu_bytes_to_use": GIB, "store_threshold": -1}, "store_threshold -1: a number from 0 on"),
        ({"cpu_bytes_to_use": GIB, "store_treshold": 2}, "store_treshold 2: unknown; store_threshold is one"),
        ({"cpu_bytes_to_use": GIB, "block_size": 64}, "block_size 64: a block of the store is one of the device"),
        ({"cpu_bytes_to_use": GIB, "eviction_policy": "arc"}, 'eviction_policy "arc": the store has one: S3-FIFO'),
        ({"cpu_bytes_to_use": GIB, "spec_name": "Mine"}, 'spec_name "Mine": CPUOffloadingSpec'),
        ({"num_cpu_blocks": 4}, "num_cpu_blocks 4: the store's size is given in bytes, as cpu_bytes_to_use"),
    ],
)
def test_what_vllms_store_has_and_this_one_has_not_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as found:
        settled({**OFFLOADING, "kv_connector_extra_config": options})
    assert str(found.value).startswith(f"--kv-transfer-config: {text}")


def test_the_size_is_given_once() -> None:
    given = {**OFFLOADING, "kv_connector_extra_config": {"cpu_bytes_to_use": GIB}}
    with pytest.raises(UsageError, match="cpu_bytes_to_use: --kv-offloading-size says the same; give one of them"):
        settled(given, kv_offloading_size=1.0)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (MeshConfig(kv_transfer=KVTransferConfig(kv_offloading_path="/x")), "--kv-offloading-path: it is a tier below"),
        (
            MeshConfig(kv_transfer=KVTransferConfig(kv_offloading_size=0.5, kv_offloading_disk_size=9)),
            "--kv-offloading-disk-size: it is the size of --kv-offloading-path",
        ),
        (
            MeshConfig(kv_transfer=STORE, cache=CacheConfig(enable_prefix_caching=False)),
            "--kv-offloading-size: pages are found by their prefix; leave --no-enable-prefix-caching out",
        ),
        *(
            (
                MeshConfig(kv_transfer=STORE, **elsewhere),
                "--kv-offloading-size: ranks of other nodes cannot map this host's",
            )
            for elsewhere in (
                {"parallel": ParallelConfig(nnodes=2, data_parallel_size=2)},
                {"network": NetworkConfig(listen="10.0.0.1:5700")},
                {"network": NetworkConfig(join="10.0.0.1:5700", headless=True)},
            )
        ),
        *(
            (
                MeshConfig(kv_transfer=BETWEEN, **elsewhere),
                "--kv-transfer-config: kv_ip is an address of one node, and this mesh has several; have a mesh on each",
            )
            for elsewhere in (
                {"parallel": ParallelConfig(nnodes=2, data_parallel_size=2)},
                {"network": NetworkConfig(listen="10.0.0.1:5700")},
                {"network": NetworkConfig(join="10.0.0.1:5700", headless=True)},
            )
        ),
    ],
)
def test_what_cannot_move_pages_is_refused(config: MeshConfig, text: str) -> None:
    with pytest.raises(UsageError) as found:
        check(config)
    assert text in str(found.value)


def test_a_model_that_gives_vectors_keeps_no_pages() -> None:
    with pytest.raises(
        UsageError, match=r"--kv-offloading-size: .* gives vectors here, and keeps no pages; leave it out"
    ):
        check(MeshConfig(kv_transfer=STORE), pools=True)


def test_more_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available", lambda: 3 * GIB)
    check(MeshConfig(kv_transfer=KVTransferConfig(kv_offloading_size=3.0)))
    with pytest.raises(UsageError, match=r"--kv-offloading-size 3\.5: this machine has 3\.0 GiB left; give less"):
        check(MeshConfig(kv_transfer=KVTransferConfig(kv_offloading_size=3.5)))


def test_the_store_is_one_of_the_processes() -> None:
    there = placement.identities(placement.settled(MeshConfig(kv_transfer=STORE)))
    assert [identity for identity in there if identity.role is Role.STORE] == [Identity(Role.STORE)]
    assert not [one for one in placement.identities(placement.settled(MeshConfig())) if one.role is Role.STORE]


def test_the_python_api_has_vllms_names() -> None:
    found = flags.build(settings_of({"kv_offloading_size": 0.25, "kv_offloading_backend": "native"}), None)
    assert found.kv_transfer == KVTransferConfig(kv_offloading_size=0.25)


def test_a_size_that_is_none_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["serve", "--kv-offloading-size", "0"]) != 0
    assert capsys.readouterr().err == "meshlm: error: --kv-offloading-size: expected `float` > 0.0\n"


def test_a_path_that_can_hold_no_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(path: object) -> MeshConfig:
        return MeshConfig(kv_transfer=KVTransferConfig(kv_offloading_size=0.5, kv_offloading_path=str(path)))

    check(config(tmp_path))
    check(config(tmp_path / "not" / "there"))
    check(config("memory://bucket/kv"))
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "kv"):
        with pytest.raises(UsageError) as found:
            check(config(path))
        assert str(found.value) == f"--kv-offloading-path {path}: {tmp_path / 'file'} is a file; give a folder"
    with pytest.raises(UsageError, match="--kv-offloading-path none://x: Protocol not known: none"):
        check(config("none://x"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    check(config(tmp_path))
    with pytest.raises(UsageError, match=f"it cannot be made in {tmp_path}, where nothing may be written"):
        check(config(tmp_path / "new"))
