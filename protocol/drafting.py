"""The extra of a request that says itself how many tokens may be drafted for it."""

from meshlm.protocol.extra_kind import ExtraKind


class Drafting(ExtraKind, frozen=True, tag="drafting"):
    """The text is the same with any number of drafts. A request without this has as many as its server drafts."""

    num_speculative_tokens: int  # in a step, at most; 0: none

    @property
    def max_drafts(self) -> int:
        return self.num_speculative_tokens
