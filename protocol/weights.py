"""Which weights a worker has: versions, of which the coordinator says the one that the mesh is to have.

A mesh begins with version 0, the model's own files. Each update is the next one. A worker that begins, or comes back, says in
WorkerReady which it has; its scheduler has it read the mesh's version before it is sent a plan, and a rank of another version gets no
requests. The manifest of a version, its source and its digest, is all that is needed to read it again.
"""

import hashlib
from typing import Literal

from msgspec import Struct

UNKNOWN = -1  # the number of weights that are none of the mesh's versions


class WeightsVersion(Struct, frozen=True, omit_defaults=True):
    """`source`: the folder (or file) that holds the weights; empty: only the memory of workers does. `digest`: of the source's files
    as they were (runtime/model_files/digest.py), or of the call that changed them; empty: not known."""

    number: int = 0
    name: str = ""  # that a trainer gave it
    source: str = ""
    digest: str = ""

    @property
    def label(self) -> str:
        """What answers and figures call it."""
        return self.name or str(self.number)

    @property
    def key(self) -> bytes:
        """Its part of a block's key: KV of other weights is other KV. Of the weights of the start: empty."""
        return self.digest.encode() if self.number else b""

    @property
    def in_memory(self) -> bool:
        """Whether nobody can read it again."""
        return self.number != 0 and not self.source

    def is_same(self, other: "WeightsVersion") -> bool:
        """Whether both are one version, whatever they are called. Each host has the weights of the start where it found them."""
        return self.number == other.number and (not self.number or self.digest == other.digest)

    def holds_same(self, other: "WeightsVersion") -> bool:
        """Whether the weights are equal, as far as their digests tell."""
        return self.is_same(other) or (bool(self.digest) and (self.source, self.digest) == (other.source, other.digest))

    def after_call(self, call: str) -> "WeightsVersion":
        """The version of a worker of this one whose weights this call has changed: all that do the same have the same then."""
        digest = hashlib.sha256(f"{self.digest} {call}".encode()).hexdigest()
        return WeightsVersion(self.number + 1, digest=digest)


RollMode = Literal["wait", "keep", "abort"]


class Roll(Struct, frozen=True, omit_defaults=True):
    """Ranks take the mesh's version one after another. `others`: the versions that serve beside it until the last rank has it. `mode`:
    what becomes of the requests that run at the rank whose turn it is: they run to their end there (wait), go on with whichever version
    (keep), or end (abort). is_back: a rank could not have the new one, and all go back to the one before."""

    others: tuple[WeightsVersion, ...]
    mode: RollMode = "wait"
    is_back: bool = False


class Manifest(Struct, frozen=True, omit_defaults=True):
    """The mesh's version, and the roll to it that is not over."""

    version: WeightsVersion
    roll: Roll | None = None
