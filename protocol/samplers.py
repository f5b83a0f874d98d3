"""llama.cpp's samplers: names, meanings and order are its own (kernels/llama_samplers), values that are off by default, and ranges.

A field here is a field of `SamplingParams` and of the bodies that generate, with this range; `SamplingParams` of the Python API has it
in its own signature, with the same range.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from meshlm.protocol.extra_kind import ExtraKind

MAX_BREAKERS = 64
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Breakers = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=1)], ...], Meta(max_length=MAX_BREAKERS)]


class LlamaSamplers(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that has typical_p, top_n_sigma or xtc_probability has all that truncates in llama.cpp's order, before the
    temperature: top_n_sigma, top_k, typical_p, top_p, min_p, xtc."""

    typical_p: Share = 1.0  # 1 is off
    top_n_sigma: Annotated[float, Meta(ge=-1.0, le=1e6)] = 0.0  # 0 or less is off
    xtc_probability: Share = 0.0  # 0 is off
    xtc_threshold: Share = 0.1  # above 0.5 is off
    dry_multiplier: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0  # 0 is off
    dry_base: Annotated[float, Meta(ge=0.0, le=1e6)] = 1.75  # below 1 is off
    dry_allowed_length: Annotated[int, Meta(ge=0, le=1 << 30)] = 2
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=1 << 30)] = -1  # tokens that count; -1: all; 0 is off
    # single characters: no repetition reaches back over a token with one
    dry_sequence_breakers: Breakers = "\n", ":", '"', "*"

    @property
    def truncates_as_llama(self) -> bool:
        excludes = self.xtc_probability > 0 and self.xtc_threshold <= 0.5
        return self.typical_p < 1 or self.top_n_sigma > 0 or excludes

    @property
    def repeats_less(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0


NAMES = LlamaSamplers.__struct_fields__
OPTIONAL = [(field.name, field.type | None, None) for field in msgspec.structs.fields(LlamaSamplers)]
"""The fields of a body, where they may be left out."""


class SequenceBreakers(ExtraKind, frozen=True, tag="sequence_breakers", omit_defaults=True):
    """DRY's sequence breakers. The detokenizer names the tokens that hold one of the texts."""

    texts: tuple[str, ...]
    token_ids: bytes = b""  # int32


def breakers_of(params: LlamaSamplers) -> tuple[SequenceBreakers, ...]:
    """The extra that these parameters need beside themselves."""
    return (
        (SequenceBreakers(params.dry_sequence_breakers),)
        if params.repeats_less and params.dry_sequence_breakers
        else ()
    )
