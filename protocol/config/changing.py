"""The settings that may change while a mesh runs (`meshlm set`, POST /settings), and how."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from meshlm.protocol.config import MeshConfig, log_levels
from meshlm.protocol.config.kv_transfer import KVTransferConfig, counts_of, num_prefill_ranks

CHANGING = {
    "log_level": "run",
    "log_requests_per_s": "run",
    "max_concurrent_requests": "server",
    "max_concurrent_bytes": "server",
    "max_waiting": "scheduler",
    "dp_roles": "kv_transfer",
}
"""Name of a setting -> its section. Who uses one reads it from the configuration each time, or hears ChangeSettings."""


def changed(config: MeshConfig, values: Mapping[str, Any]) -> MeshConfig:
    """The configuration with these values. ValueError, in one line, for one that is not there or not right."""
    for name, value in values.items():
        if name not in CHANGING:
            raise ValueError(f"{name.replace('_', '-')}: it cannot change while the mesh runs; these can: {known()}")
        if name == "log_level":
            try:
                log_levels.parse(str(value))
            except ValueError as error:
                raise ValueError(f"log-level: {error}") from None
        section = getattr(config, CHANGING[name])
        try:
            after = msgspec.convert({**msgspec.to_builtins(section), name: value}, type(section), strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name.replace('_', '-')}: {str(error).partition(' - at ')[0]}") from None
        if isinstance(after, KVTransferConfig):
            with _of_roles():
                after = msgspec.structs.replace(after, num_prefill_ranks=counts_of(after.dp_roles)["prefill"])
        config = msgspec.structs.replace(config, **{CHANGING[name]: after})
    return config


def checked(config: MeshConfig, values: Mapping[str, Any]) -> MeshConfig:
    """`changed`, as an operator asks for it: ValueError also for roles that this mesh cannot have."""
    after = changed(config, values)
    if "dp_roles" in values:
        with _of_roles():
            if not config.kv_transfer.shares_pages:
                raise ValueError("the ranks of this mesh read no pages of one another; start it with --dp-roles")
            num_prefill_ranks(after.kv_transfer.dp_roles, config.parallel.data_parallel_size)
    return after


@contextmanager
def _of_roles() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"dp-roles: {error}") from None


def with_num_ranks(config: MeshConfig, num_ranks: int) -> MeshConfig:
    """The configuration with another number of data-parallel ranks. The first ones stay the ranks for prompts."""
    kv = config.kv_transfer
    if kv.dp_roles:
        roles = f"prefill:{kv.num_prefill_ranks},decode:{num_ranks - kv.num_prefill_ranks}"
        kv = msgspec.structs.replace(kv, dp_roles=roles)
    parallel = msgspec.structs.replace(config.parallel, data_parallel_size=num_ranks)
    return msgspec.structs.replace(config, parallel=parallel, kv_transfer=kv)


def known() -> str:
    return ", ".join(name.replace("_", "-") for name in CHANGING)
