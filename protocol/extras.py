"""What travels with a request beside its tokens and sampling parameters: one tuple from Submit over EngineRequest to NewRow.

The frontend makes an extra, the detokenizer prepares it, the worker uses it. No process between them has a field for one kind: what
they must know of all kinds alike, `ExtraKind` answers. A new kind is a module here, a line in the union, and a module in each process
that does something with it: detokenizer/extras/, scheduler_proc, workers.
"""

from collections.abc import Iterable
from typing import TypeVar

from meshlm.protocol.adapters import Adapter
from meshlm.protocol.audio import Audio
from meshlm.protocol.drafting import Drafting
from meshlm.protocol.extra_kind import EncoderInput, ExtraKind, Span
from meshlm.protocol.grammar import Grammar
from meshlm.protocol.kv_transfer import KVTransfer
from meshlm.protocol.media import Media
from meshlm.protocol.pool import Pool
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.protocol.samplers import SequenceBreakers
from meshlm.protocol.wire.parts import joined

Extra = Pool | Grammar | PromptEmbeds | Audio | Media | SequenceBreakers | Drafting | KVTransfer | Adapter
Extras = tuple[Extra, ...]  # at most one of each kind
Kind = TypeVar("Kind", bound=ExtraKind)


def find_extra(extras: Iterable[ExtraKind], kind: type[Kind]) -> Kind | None:
    """The extra of this kind; None where there is none."""
    for extra in extras:
        if isinstance(extra, kind):
            return extra
    return None


def generates(extras: Iterable[ExtraKind]) -> bool:
    return all(extra.generates for extra in extras)


def max_drafts(extras: Iterable[ExtraKind]) -> int | None:
    """The drafted tokens of the request that a step may verify, at most; None: any number."""
    return min((most for extra in extras if (most := extra.max_drafts) is not None), default=None)


def first_uncertain(extras: Iterable[ExtraKind]) -> int | None:
    """As ExtraKind has it, of all of them."""
    return min((first for extra in extras if (first := extra.first_uncertain) is not None), default=None)


def slot_key(extras: Iterable[ExtraKind]) -> bytes:
    """What its request takes one of the workers' slots for, shared by all requests with the same; empty: nothing."""
    return next((key for extra in extras if (key := extra.slot_key)), b"")


def slot_name(extras: Iterable[ExtraKind]) -> str | None:
    """What clients call that; None: nothing has a name."""
    return next((name for extra in extras if (name := extra.slot_name)), None)


def num_bytes(extras: Iterable[ExtraKind]) -> int:
    """The bytes that they take on the wire and in memory, about."""
    return sum(extra.num_bytes for extra in extras)


def uncut_spans(extras: Iterable[ExtraKind]) -> list[Span]:
    """The runs of tokens that are computed in one step each, in order."""
    return sorted(span for extra in extras for span in extra.uncut)


def encoder_inputs(extras: Iterable[ExtraKind]) -> list[EncoderInput]:
    """What encoders compute for a request, in the order of its prompt."""
    return sorted(one for extra in extras for one in extra.encoder_inputs)


def with_keys(extras: Extras) -> Extras:
    """Those that may decide what the KV of tokens is."""
    return tuple(extra for extra in extras if type(extra).key_parts is not ExtraKind.key_parts)


def key_parts(cache_salt: str, extras: Iterable[ExtraKind], begin: int, end: int) -> bytes:
    """What decides the KV of the tokens from `begin` to `end` beside these tokens and those before; empty: nothing.

    The prefix cache of a scheduler and the coordinator's index of prefixes both go by it. Requests with different salts share no block.
    """
    salt = [b"salt", cache_salt.encode()] if cache_salt and not begin else []
    return joined(*salt, *(part for extra in extras if (part := extra.key_parts(begin, end))))
