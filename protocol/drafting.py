"""The extra of a request that says itself how many tokens may be drafted for it."""

from meshlm.protocol.extra_kind import ExtraKind


class Drafting(ExtraKind, frozen=True, tag="drafting"):
    """The text is the same with any number of drafts. A request without this has as many as its server drafts."""

    num_speculative_tokens: int  # in a step, at most; 0: none

    @property
    def max_drafts(self) -> int:
        return self.num_speculative_tokens


NAME = "num_speculative_tokens"  # the field of a request


def drafting_of(wanted: int | None, most: int) -> tuple[Drafting, ...]:
    """The extra of a request with this field, at a server that drafts `most` tokens. ValueError where it wants more."""
    if wanted is not None and wanted > most:
        raise ValueError(
            f"at most {most}, which the server drafts" if most else "the server drafts no tokens (--speculative-config)"
        )
    return () if wanted is None or wanted == most else (Drafting(wanted),)
