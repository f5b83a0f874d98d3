"""The extra of a request that an adapter (LoRA) answers: the base model's linear layers, each with a product of low rank beside it.

An adapter is known by what its files hold, not by its name: the digest is in the keys of KV blocks, so that of an adapter that was
loaded again under its old name no block is found that the old one computed. The frontend knows names, schedulers and workers digests.
"""

from array import array
from typing import ClassVar, Self

from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol.extra_kind import ExtraKind

NEVER = 2**31 - 1  # a position behind all tokens


class Adapter(ExtraKind, frozen=True, tag="adapter"):
    """`path` is the folder of its files, which every worker reads.

    An activated adapter (aLoRA, Greenewald et al. 2025) changes tokens from the last place on at which a prompt has `invocation`; those
    before are the base's, and so is their KV. Where a prompt has it nowhere it changes none."""

    name: str  # by which clients ask for it
    path: str
    digest: bytes  # sha256 of its files
    invocation: bytes = b""  # int32 token ids; empty: it changes all tokens
    invoked_at: bytes = b""  # int32 positions at which the prompt has the invocation; the detokenizer finds them
    is_prepared: ClassVar[bool] = True

    @property
    def slot_key(self) -> bytes:
        return self.digest

    @property
    def slot_name(self) -> str:
        return self.name

    @property
    def first(self) -> int:
        """The position of the first token that it changes."""
        if not self.invocation:
            return 0
        return array("i", self.invoked_at[-4:])[0] if self.invoked_at else NEVER

    def in_prompt(self, token_ids: "array[int]") -> Self:
        """The same, which knows where this prompt has the invocation."""
        return replace(self, invoked_at=_places(token_ids, self.invocation)) if self.invocation else self

    def cut(self, begin: int, end: int) -> Self:
        size, places = len(self.invocation) // 4, array("i", self.invoked_at)
        left = array("i", [at - begin for at in places if begin <= at and at + size <= end])
        return replace(self, invoked_at=left.tobytes()) if self.invoked_at else self

    def key_parts(self, begin: int, end: int) -> bytes:
        """Blocks behind the first one that it changes follow from that. Where it begins within it is not said by its tokens: these may
        have the invocation once more, and the prompt behind them has it again, or has not."""
        first = self.first
        if not begin <= first < end:
            return b""
        return b"adapter" + self.digest + (first.to_bytes(4, "little") if self.invocation else b"")


def _places(token_ids: "array[int]", wanted: bytes) -> bytes:
    """The places at which the tokens have a sequence."""
    raw, found, at = token_ids.tobytes(), array("i"), -1
    while (at := raw.find(wanted, at + 1)) >= 0:
        if at % 4 == 0:
            found.append(at // 4)
    return found.tobytes()


class AdapterList(Struct, frozen=True, tag="adapters", omit_defaults=True):
    """All adapters that clients may name. The coordinator holds the list and tells frontends of each new one; a frontend that changes
    it sends the next version, which is taken if nobody else was first. Version 0 is that of the settings. A coordinator that was
    replaced hears of the list from the frontends."""

    version: int = 0
    adapters: tuple[Adapter, ...] = ()
