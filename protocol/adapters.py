"""The extra of a request that an adapter (LoRA) answers: the base model's linear layers, each with a product of low rank beside it.

An adapter is known by what its files hold, not by its name: the digest is in the keys of KV blocks, so that of an adapter that was
loaded again under its old name no block is found that the old one computed. The frontend knows names, schedulers and workers digests.
"""

from typing import ClassVar

from msgspec import Struct

from meshlm.protocol.extra_kind import ExtraKind


class Adapter(ExtraKind, frozen=True, tag="adapter"):
    """`path` is the folder of its files, which every worker reads."""

    name: str  # by which clients ask for it
    path: str
    digest: bytes  # sha256 of its files
    is_prepared: ClassVar[bool] = True

    @property
    def slot_key(self) -> bytes:
        return self.digest

    @property
    def slot_name(self) -> str:
        return self.name

    def key_parts(self, begin: int, end: int) -> bytes:
        """Blocks behind the first one follow from it."""
        return b"" if begin else b"adapter" + self.digest


class AdapterList(Struct, frozen=True, tag="adapters", omit_defaults=True):
    """All adapters that clients may name. The coordinator holds the list and tells frontends of each new one; a frontend that changes
    it sends the next version, which is taken if nobody else was first. Version 0 is that of the settings. A coordinator that was
    replaced hears of the list from the frontends."""

    version: int = 0
    adapters: tuple[Adapter, ...] = ()
