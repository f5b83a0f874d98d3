"""What the planner and the table of requests ask of requests' extras beside what `ExtraKind` answers. Pure."""

from collections.abc import Collection, Iterable
from functools import singledispatch

from meshlm.protocol.extra_kind import Span
from meshlm.protocol.extras import Extra
from meshlm.protocol.pool import Pool, PoolKind


@singledispatch
def unfit(extra: Extra, pool_kinds: Collection[PoolKind]) -> str:
    """Why these workers can never compute a request that has it; empty: they can."""
    return ""


@unfit.register
def _(extra: Pool, pool_kinds: Collection[PoolKind]) -> str:
    return "" if extra.kind in pool_kinds else f"the workers of this model cannot pool {extra.kind.value!r}"


def end_between(uncut: Iterable[Span], start: int, count: int, most: int) -> int:
    """As many of the tokens from `start` on as the step may compute without ending inside a run that must not be cut.

    That is `count` where it ends inside none; else the tokens before the run; where it begins with the run, all of it, unless these are
    more than `most`. A step may begin inside a run, behind what the prefix cache has: that was computed with all of it."""
    for first, length in uncut:
        end = first + length
        if count > 0 and first < start + count < end:
            if first > start:
                return first - start
            return end - start if end - start <= most else 0
    return count
