"""The settings of KV pages that move: tiers below the device's memory, ranks for prompts and for decoding, connectors."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

ROLES = ("prefill", "decode")


class PageTransfer(Struct, frozen=True, kw_only=True):
    """A connector between meshes (workers/kv/remote/), as --kv-transfer-config has it. It is never a flag."""

    connector: str  # its name there
    role: Literal["kv_producer", "kv_consumer", "kv_both"]
    host: str  # where this node's workers listen ...
    port: int  # ... that of the first; the others follow. 0: any
    remote_hosts: tuple[str, ...] = ()  # of the meshes that requests may name, whose pages are believed
    buffer_bytes: int = 0  # of pages that other meshes send
    by_request_id: bool = False  # request ids carry the addresses; else kv_transfer_params do
    pushes: bool = False  # pages are sent as soon as they are there; else they wait to be asked for
    lease_s: float = 30.0  # so long do they wait
    proxy: str = ""  # HOST:PORT of a proxy that is told every few seconds that this mesh is here ...
    http_address: str = ""  # ... where it serves


class KVTransferConfig(Struct, frozen=True, kw_only=True):
    """Flags, and below them what they come to. Names are vLLM's where the meaning is the same."""

    kv_offloading_size: (
        Annotated[float, Meta(gt=0, description="GiB of the host's memory for KV blocks that have left the device")]
        | None
    ) = None
    kv_offloading_backend: Annotated[Literal["native"], Meta(description="which store keeps them")] = "native"
    kv_offloading_path: Annotated[
        str,
        Meta(description="folder or URL (fsspec) for KV blocks that have left that memory too; they outlive the mesh"),
    ] = ""
    kv_offloading_disk_size: (
        Annotated[int, Meta(ge=1, description="bytes there at most; suffixes K M G T", extra={"bytes": True})] | None
    ) = None
    kv_transfer_config: Annotated[
        str,
        Meta(description="connectors that move KV between meshes, a JSON object: kv_connector, kv_role, ... as vLLM's"),
    ] = ""
    dp_roles: Annotated[
        str,
        Meta(
            description="ranks for prompts and ranks that decode, as prefill:1,decode:2; they are numbered in this order"
        ),
    ] = ""

    # Set by the supervisor before any child starts (supervisor/settings/kv_transfer.py); none of these is a flag.
    connectors: tuple[str, ...] = ()  # of the workers, by name: plug-ins
    transfer: PageTransfer | None = None  # between meshes
    engine_id: str = ""  # of this mesh, for others
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    connector_options: str = "{}"  # kv_connector_extra_config, JSON
    num_prefill_ranks: int = 0  # the first ranks; 0: every rank does both
    content_fingerprint: str = (
        ""  # the same without places and times, for other meshes: what the files hold, by samples
    )
    fingerprint: str = ""  # digest of the model's files and settings that decide what KV is

    @property
    def has_store(self) -> bool:
        """Whether a store process keeps pages."""
        return self.kv_offloading_size is not None

    @property
    def shares_pages(self) -> bool:
        """Whether ranks read one another's pages."""
        return self.num_prefill_ranks > 0

    @property
    def moves(self) -> bool:
        """Whether pages move at all; if not, nothing of it costs anything."""
        return self.has_store or self.shares_pages or bool(self.connectors) or self.transfer is not None

    @property
    def asks_by_request(self) -> bool:
        """Whether a request's kv_transfer_params find somebody who heeds them."""
        return bool(self.connectors) or (self.transfer is not None and not self.transfer.by_request_id)


def counts_of(dp_roles: str) -> dict[str, int]:
    """The number of ranks of each role. ValueError in words that follow the setting's name."""
    counts: dict[str, int] = {}
    for word in dp_roles.split(","):
        role, _, count = word.partition(":")
        if role not in ROLES or role in counts or not count.isdecimal() or not int(count):
            raise ValueError(f"{word!r} is no role with a number; prefill:1,decode:1 would be some")
        counts[role] = int(count)
    if len(counts) < len(ROLES):
        missing = next(role for role in ROLES if role not in counts)
        raise ValueError(f"no rank is for {missing}; without roles each rank does both")
    return counts


def num_prefill_ranks(dp_roles: str, num_ranks: int) -> int:
    """The number of ranks for prompts, of so many in all. ValueError as above."""
    counts = counts_of(dp_roles)
    if (total := sum(counts.values())) != num_ranks:
        raise ValueError(f"{total} ranks, and --data-parallel-size is {num_ranks}; give both alike")
    return counts["prefill"]
