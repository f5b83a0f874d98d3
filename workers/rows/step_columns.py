"""One step on the host: its plan's columns. Made by the engine before anything is launched; knows no device."""

from typing import TYPE_CHECKING

import numpy as np

from meshlm.protocol.edges.step import StepPlan
from meshlm.workers.rows.changes import I32, I64

if TYPE_CHECKING:
    from meshlm.workers.rows.shared_prefixes import Clusters
from typing import NamedTuple


class Mark:
    """A point in what was launched: all before it is computed when it is reached. This one is a device's that computes in step; a GPU
    has events."""

    def synchronize(self) -> None:
        """Wait until it is reached."""

    def query(self) -> bool:
        """Whether it is reached."""
        return True

    def elapsed_time(self, end: "Mark") -> float:
        """Milliseconds on the device from here to there; 0: the host's clock says it (StepResult.gpu_ns)."""
        return 0.0


COMPUTED = Mark()


class Contexts(NamedTuple):
    """The contexts that a step's requests see."""

    longest: int  # tokens that a request has when the step is computed
    num_pairs: float  # of prompt tokens and the keys that each sees
    num_keys: int  # of all decodes; those that are read once for several count once


class Drafts(NamedTuple):
    """The tokens that a step verifies, host side. They stand behind their rows' known tokens."""

    counts: I32  # [samples] of each request that samples, in the order of StepColumns.places
    tokens: I32  # [sum(counts)], request by request


class Verified(NamedTuple):
    """The requests of a step as its plan has them, of one in which each token of a decode stands as a request of its own: only the
    device knows where. Of m requests: all decodes, then the others that sample."""

    rows: I32  # [m]
    ends: I32  # [m] prefix sums of the tokens of decodes; others have none
    starts: I32  # [m] where a decode's tokens begin in its row; -1: at its last known token
    firsts: I32  # [m] the first line of logits
    drafts: I32  # [m] -1: it does not sample
    tokens: I32  # [m] place among the step's tokens of the first that samples
    origins: I64  # [n] place in the plan of each request of the step
    places: I64  # [s] in the plan, of those that sample ...
    lines: I32  # [s] ... and how many lines of logits each has
    may_draft: bool  # the plan says so

    @property
    def has_drafts(self) -> bool:
        return len(self.lines) < int(self.lines.sum())


class Lines(NamedTuple):
    """The tokens of a step behind which one is sampled: the last known one of each request that samples, and its drafts."""

    places: I64  # [l]: of their requests in the batch
    tokens: I64  # [l]: their places among the step's tokens
    lens: I64  # [l]: their request's tokens up to there


class StepColumns:
    """One step's requests, host side. n requests, t tokens."""

    __slots__ = ("adapted", "counts", "drafts", "n", "places", "rows", "samples", "shared", "starts", "t", "verified")

    def __init__(self, plan: StepPlan) -> None:
        self.rows, self.starts = np.frombuffer(plan.rows, np.int32), np.frombuffer(plan.starts, np.int32)
        self.n, self.t = len(self.rows), plan.num_tokens
        self.counts = np.frombuffer(plan.counts, np.int32) if plan.counts else np.ones(self.n, np.int32)
        self.samples = np.frombuffer(plan.samples, np.uint8).astype(np.bool_) if plan.samples else None
        self.places = np.arange(self.n) if self.samples is None else np.flatnonzero(self.samples)  # that sample
        self.shared: Clusters | None = None  # its decodes that read prefixes together
        self.adapted = False  # some rows have adapters, which kernels add
        self.drafts: Drafts | None = None  # among its tokens; set before the head is launched
        self.verified: Verified | None = None  # where only the device knows how long rows are

    @property
    def num_lines(self) -> int:
        return len(self.places) + (0 if self.drafts is None else len(self.drafts.tokens))

    def lines(self) -> Lines:
        ends: I64 = np.cumsum(self.counts, dtype=np.int64)
        if self.drafts is None:
            return Lines(self.places, ends[self.places] - 1, (self.starts + self.counts)[self.places].astype(np.int64))
        each = 1 + self.drafts.counts
        places = np.repeat(self.places, each)
        left = np.repeat(np.cumsum(each, dtype=np.int64), each) - 1 - np.arange(len(places))  # drafts behind the line
        return Lines(places, ends[places] - 1 - left, (self.starts + self.counts)[places].astype(np.int64) - left)

    def of_tokens(self) -> tuple[I32, I64]:
        """The row and the position of each token."""
        if self.t == self.n:
            return self.rows, self.starts.astype(np.int64)
        within = np.arange(self.t) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        return np.repeat(self.rows, self.counts), np.repeat(self.starts, self.counts).astype(np.int64) + within

    def halves(self, cut: int) -> "tuple[StepColumns, StepColumns]":
        """The first `cut` tokens and the rest, without samples. A request may be in both."""
        ends = np.cumsum(self.counts)
        first = np.minimum(self.counts, np.maximum(cut - (ends - self.counts), 0))
        return _some(self, first, self.starts), _some(self, self.counts - first, self.starts + first)

    @property
    def shows_drafts(self) -> bool:
        """Whether tokens see others of their row that this step computes, though each stands as a request of its own."""
        return self.verified is not None and self.verified.has_drafts

    @property
    def uniform(self) -> bool:
        """One token each, and each samples."""
        return self.n == self.t and (self.samples is None or bool(self.samples.all()))

    @property
    def num_decodes(self) -> int:
        """Requests of one token that stand before all others."""
        return int(np.argmin(self.counts == 1)) if (self.counts != 1).any() else self.n

    def contexts(self) -> Contexts:
        lone = self.counts == 1
        counts = self.counts[~lone].astype(np.float64)
        pairs = counts * (self.starts[~lone] + counts / 2)
        longest = (self.starts + self.counts).max(initial=0)
        keys = int(self.starts[lone].sum()) - (0 if self.shared is None else self.shared.saved)
        return Contexts(int(longest), float(pairs.sum()), keys)

    @property
    def num_prompts(self) -> int:
        return int((self.counts > 1).sum())


def _some(step: StepColumns, counts: I32, starts: I32) -> StepColumns:
    """The requests that have any of these tokens."""
    here = counts > 0
    return columns_of(step.rows[here], starts[here].astype(np.int32), counts[here].astype(np.int32))


def columns_of(rows: I32, starts: I32, counts: I32) -> StepColumns:
    """The columns of a step that no plan has brought; every request samples."""
    plan = StepPlan(0, 0, rows.tobytes(), starts.tobytes(), counts.tobytes(), b"", int(counts.sum()))  # type: ignore[arg-type]
    return StepColumns(plan)
