"""Bodies and answers of the routes that change the weights, under vLLM's names; and one of SGLang's."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, defstruct

from meshlm.protocol.weight_transfer import JoinInfo, UpdateInfo

PRINTABLE = r"^[\x20-\x7e]*$"  # it stands in a header
Name = Annotated[str, Meta(max_length=256, pattern=PRINTABLE)]
Mode = Literal["keep", "wait", "abort"]


class InitRequest(Struct, frozen=True, kw_only=True):
    """POST /init_weight_transfer_engine."""

    init_info: JoinInfo = JoinInfo()


class StartRequest(Struct, frozen=True, kw_only=True):
    """POST /start_weight_update. rolling: one rank alone checks the weights, while the others serve."""

    is_checkpoint_format: bool = True
    rolling: bool = False


class UpdateRequest(Struct, frozen=True, kw_only=True):
    """POST /update_weights."""

    update_info: UpdateInfo


class FinishRequest(Struct, frozen=True, kw_only=True):
    """POST /finish_weight_update. weight_version: the name of the new weights. mode: what becomes of requests that run: they go on,
    run to their end before, or end before. keep_kv: those that go on do so with the KV of the old weights; else it is computed anew.
    abort: what was checked is dropped. rolling: ranks change one after another while the others serve. Without a mode, requests go on
    (keep); rolling, they run to their end (wait)."""

    weight_version: Name = ""
    mode: Mode | None = None
    keep_kv: bool = False
    abort: bool = False
    rolling: bool = False


class DiskUpdate(Struct, frozen=True, kw_only=True):
    """POST /update_weights_from_disk. flush_cache: what runs is computed anew. mode, rolling: as in FinishRequest."""

    model_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    weight_version: Name = ""
    mode: Mode | None = None
    flush_cache: bool = True
    rolling: bool = False


class NameRequest(Struct, frozen=True, kw_only=True):
    """POST /update_weight_version."""

    new_version: Annotated[str, Meta(min_length=1, max_length=256, pattern=PRINTABLE)]


class CheckRequest(Struct, frozen=True, kw_only=True):
    """POST /weight_checker."""

    action: Name = "checksum"


class RankWeights(Struct):
    dp_rank: int
    weight_version: str | None
    behind: str | None


class WeightInfo(Struct):
    """The version that all ranks are to have, and which each has. behind: why it has another. updating: what is being done."""

    weight_version: str
    number: int
    source: str | None
    digest: str | None
    updating: str | None
    ranks: list[RankWeights]


Updated = defstruct("Updated", [("message", str)])
DiskUpdated = defstruct("DiskUpdated", [("success", bool), ("message", str)])
Named = defstruct("Named", [("success", bool), ("new_version", str)])
Checked = defstruct("Checked", [("success", bool), ("checksums", list[str])])
