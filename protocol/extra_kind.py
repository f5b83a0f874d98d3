"""What each kind of extra says of itself, so that the processes on its way treat all kinds alike. The kinds are listed in extras.py."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self

from msgspec import Struct

Span = tuple[int, int]  # the position of a first token, and how many there are


class EncoderInput(NamedTuple):
    """What an encoder makes vectors of, which take the places of tokens: all of them in the step that computes the first."""

    position: int  # of the first token that stands for it: a step may end before it
    first: int  # the position of the first vector ...
    end: int  # ... and behind the last
    num_vectors: int
    digest: bytes


class ExtraKind(Struct, frozen=True):
    """The answers of an extra that costs nothing and changes nothing. A kind overrides the answers that differ for it."""

    generates: ClassVar[bool] = True  # whether its request gets output tokens
    is_prepared: ClassVar[bool] = False  # whether workers prepare it beside their steps before its request gets a row

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes on the wire and in memory, about."""
        return 0

    @property
    def uncut(self) -> Sequence[Span]:
        """The runs of tokens that are computed in one step each, since they attend to one another."""
        return ()

    @property
    def encoder_inputs(self) -> Sequence[EncoderInput]:
        """What an encoder computes for it beside the model's steps, in the order of the prompt."""
        return ()

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether its request can do without the hidden states of tokens whose KV is cached."""
        return True

    @property
    def kv_params(self) -> bytes:
        """What it says to connectors of where KV comes from or goes to, JSON; empty: nothing."""
        return b""

    @property
    def brings_kv(self) -> bool:
        """Whether another mesh has computed its request's prompt."""
        return False

    @property
    def leaves_kv(self) -> bool:
        """Whether another mesh comes for the KV of its request's prompt."""
        return False

    @property
    def max_drafts(self) -> int | None:
        """The drafted tokens of its request that a step may verify, at most; None: any number."""
        return None

    @property
    def first_uncertain(self) -> int | None:
        """The first position whose KV is wrong if a worker could not do what this says and computed the step without it; None: none."""
        return None

    @property
    def slot_key(self) -> bytes:
        """What it takes one of the workers' slots for, while its request runs; requests with equal keys share the slot. Empty: none."""
        return b""

    @property
    def slot_name(self) -> str:
        """What clients call that."""
        return ""

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether the reader of the answer has to know the prompt's token ids."""
        return False

    @property
    def constraint(self) -> str:
        """The client's name for what it forbids tokens by; empty: it forbids none."""
        return ""

    def num_vectors(self, num_prompt: int) -> int:
        """The vectors that its request gets for a prompt of so many tokens."""
        return 0

    def cut(self, begin: int, end: int) -> "Self | None":
        """What is left of it when the prompt keeps its tokens from `begin` to `end` alone; None: nothing."""
        return self

    def key_parts(self, begin: int, end: int) -> bytes:
        """What decides the KV of the tokens from `begin` to `end` beside these tokens and those before; empty: nothing."""
        return b""
