"""Names of things: processes, their lives, requests, tokens.

A process is `role/index`; each life of it has an *incarnation*, larger than the one before. A request has an id
and an *attempt*; each of its output tokens an *index* from 0. Messages are idempotent on (id, attempt, index).
"""

from enum import Enum
from typing import NewType

from msgspec import Struct


class Role(Enum):
    """The kind of a process. The value is the name that `ps`, `meshlm status` and logs show."""

    SUPERVISOR = "supervisor"
    FRONTEND = "frontend"
    DETOKENIZER = "detokenizer"
    COORDINATOR = "coordinator"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    STORE = "store"
    MEDIA = "media"

    # there is one object of each; Enum's own hash is a call in Python, on the way of every frame
    __hash__ = object.__hash__


class Identity(Struct, frozen=True, order=True, cache_hash=True):
    """A place in the mesh, `role/index`. It outlives the processes that fill it."""

    role: Role
    index: int = 0

    def __str__(self) -> str:
        return f"{self.role.value}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> "Identity":
        """'worker/3' or 'worker' -> Identity. ValueError names the roles that exist."""
        name, _, index = text.partition("/")
        try:
            return cls(Role(name), int(index or 0))
        except ValueError:
            roles = ", ".join(role.value for role in Role)
            raise ValueError(f"{text!r} is no process name: ROLE or ROLE/INDEX, ROLE one of {roles}") from None


COORDINATOR = Identity(Role.COORDINATOR)  # there is one
HEAD = Identity(Role.SUPERVISOR)  # of the node that has it; other nodes' supervisors have numbers from 1

Incarnation = NewType("Incarnation", int)  # nanoseconds since the epoch at the start of this life
RequestId = NewType("RequestId", str)  # unique in the mesh, one per choice of a client's request
Handle = NewType("Handle", int)  # int32 that stands for (request id, attempt) on one edge; never used again
TokenId = NewType("TokenId", int)
StepId = NewType("StepId", int)  # 1, 2, 3 ... within one session of a scheduler with its workers
Row = NewType("Row", int)  # a worker's persistent batch row
BlockId = NewType("BlockId", int)
Epoch = NewType("Epoch", int)  # of the coordinator's membership list


class FinishReason(Enum):
    """Why a request ended. The client sees the value, except where the comment says otherwise."""

    STOP = "stop"  # a stop string, a stop token or the model's eos
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the client left, or an operator ended it
    REPETITION = "repetition"  # its last tokens are a pattern that the request does not want
    ERROR = "error"  # the mesh could not go on; the message says why


class ErrorKind(Enum):
    """The kind of an error; the frontend maps it to an HTTP status."""

    INVALID = "invalid_request_error"  # 400: the request is wrong; `param` names the field
    NOT_FOUND = "not_found_error"  # 404
    OVERLOADED = "overloaded_error"  # 503 with Retry-After
    TIMEOUT = "timeout_error"  # 504: its deadline passed
    INTERNAL = "internal_error"  # 500
    CONFLICT = "idempotency_error"  # 422: the Idempotency-Key stands for another request, or another connection has it
    POISON = "poison_request_error"  # 400: processes of the mesh died with it in hand; it is not to be sent again
