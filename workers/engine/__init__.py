"""What a worker's engine is: something that runs one plan after the other."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from meshlm.protocol.config import Resolved
from meshlm.protocol.edges.control import GraphCounts
from meshlm.protocol.edges.step import NO_LIMIT, StepPlan, StepResult
from meshlm.protocol.kv import KVSpec
from meshlm.protocol.pool import PoolKind

if TYPE_CHECKING:
    from meshlm.workers.kv.pages import KVPages
    from meshlm.workers.rows.extras.extra import RowExtras

ProgressReport = Callable[[str, int, int, str], None]  # phase, done, total, unit
NOT_BALANCED = "start the server with --enable-eplb to move experts"
NOT_ASKED = "experts move between tensor-parallel ranks every step_interval steps (--eplb-config), and at no other time"


class EngineFacts(Struct, frozen=True):
    """The facts of an engine that the scheduler and the user need to know."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    vocab_size: int
    shown: dict[str, str]
    max_drafts: int = 0  # tokens that its drafter gives a row in one step; 0: it has none
    pool_kinds: tuple[PoolKind, ...] = ()  # that it gives vectors of ...
    pooled_bytes: int = 0  # ... and the length of one
    kv_specs: tuple[KVSpec, ...] = ()  # of each group of layers, which has a block table; none: one that keeps all
    # key-value heads of each layer of the whole model, and bytes of one in a token's row; 0: a page is not rows of such heads
    kv_heads: tuple[int, int] = (0, 0)
    attention_wave: int = 0  # tokens of a prompt whose attention over a long context fills the device once; 0: unknown
    max_draft_lines: int = NO_LIMIT  # of a step's rows with drafts: their drafts, and each row's known token


class Pending(Protocol):
    """A step that was launched."""

    def wait(self) -> StepResult:
        """Block until its tokens are on the host; called in the completion thread, in order."""


class Engine(Protocol):
    """All methods but `Pending.wait` and `graph_counts` are called by one thread."""

    facts: EngineFacts
    extras: "RowExtras[Any]"  # of its rows; its `prepare` is for other threads
    pages: "KVPages | None"  # of its KV cache, where the settings have them move (KVTransferConfig.moves); None: it keeps none

    def reset(self) -> None:
        """Forget all rows; KV contents stay: the next scheduler may build on them."""

    def step(self, plan: StepPlan, received_ns: int) -> Pending:
        """Launch a plan. May return before the device is done."""

    def be_without(self, tags: tuple[str, ...]) -> None:
        """Give back the device's memory of these tags (protocol/sleeping.py), and have that of all others: no step follows while it is
        without any. The KV cache comes back empty."""

    def rebalance(self) -> str:
        """Move experts before the next step that all ranks take. Why there are none that move; empty: it will be done."""

    def check_weights(self, resolved: Resolved) -> str:
        """Why this model cannot have the weights of these files, all of which are read; empty: it can. Nothing changes."""

    def load_weights(self, resolved: Resolved) -> None:
        """Have them: new values in the same tensors. ProcessFatal where some have been changed and others cannot be."""

    def sum_weights(self) -> str:
        """A sum over all bytes of the weights."""

    def idle(self) -> bool:
        """Nothing to do: a chance for background work (CUDA graph capture). True if there may be more of it."""

    def graph_counts(self) -> GraphCounts:
        """Counts the steps so far by CUDA graph; called in any thread."""


class Done:
    """A step that was computed at once."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result
