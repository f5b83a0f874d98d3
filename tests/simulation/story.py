"""What is said, in a line a person can read."""

from msgspec import Struct

from meshlm.protocol.edges.admit import Admit, Assign, EngineRequest, Load, Refused, Routed
from meshlm.protocol.edges.control import Died, Join, Members, MeshStats, QueueFull
from meshlm.protocol.edges.step import StepPlan, StepResult
from meshlm.protocol.edges.text import Submit, TextDeltas
from meshlm.protocol.edges.token import TokenDeltas
from meshlm.protocol.wire.columns import ints


def _work(work: EngineRequest) -> str:
    return (
        f"{work.request_id} handle {work.handle} attempt {work.attempt} after {len(work.output_token_ids) // 4} tokens"
    )


def _rows(names: bytes, starts: bytes, counts: bytes) -> str:
    rows = ints(names)
    sizes = ints(counts) or [1] * len(rows)
    return " ".join(f"{row}@{start}+{count}" for row, start, count in zip(rows, ints(starts), sizes, strict=True))


def show(what: object) -> str:
    """One message. "" for those that come all the time and say little."""
    match what:
        case Members() | MeshStats() | QueueFull():
            return ""
        case Load():
            return f"Load(serving={what.serving}, ended={what.ended})" if what.ended or not what.serving else ""
        case Join(member):
            return f"Join({member.incarnation}, ready={member.ready})"
        case Died(identity, incarnation):
            return f"Died({identity}, {incarnation})"
        case Submit():
            return f"Submit({what.request_ids} handles {what.handles} attempt {what.attempt})"
        case Admit():
            return f"Admit({_work(what.work)})"
        case Assign():
            return f"Assign({_work(what.work)}, answers to {what.detokenizer} ({what.incarnation}))"
        case Routed():
            return f"Routed(handle {what.handle} to {what.scheduler} ({what.incarnation}))"
        case Refused():
            return f"Refused(handle {what.handle}: {what.message})"
        case StepPlan():
            return f"StepPlan({what.session}/{what.step}: rows {_rows(what.rows, what.starts, what.counts)})"
        case StepResult():
            return f"StepResult({what.session}/{what.step}: {ints(what.token_ids)})"
        case TokenDeltas():
            ended = [(end.row, end.reason.value) for end in what.ended]
            return f"TokenDeltas({_rows(what.handles, what.starts, what.counts)}, ended {ended})"
        case TextDeltas():
            ended = [(end.row, end.reason.value) for end in what.finished]
            return f"TextDeltas({_rows(what.handles, what.starts, what.counts)}, ended {ended})"
        case Struct():
            return repr(what)
    return str(what)
