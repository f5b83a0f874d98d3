"""Requests wait for a slot of their adapter; others pass them, but not for ever."""

from collections import Counter

from bench import DETOKENIZER, LIFE, WORKER, Bench, limits

from meshlm.protocol.adapters import Adapter
from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.edges.step import ExtraReady, PrepareExtra, RowFailed
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, ErrorKind, Handle, RequestId
from meshlm.runtime.process.events import Received, Send
from meshlm.scheduler_proc.adapter_slots import PATIENCE_S

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def adapter(name: str) -> Adapter:
    return Adapter(name, f"/{name}", name.encode() * 32)


class SlotBench(Bench):
    """Its worker has prepared an adapter as soon as it is asked to, and knows whose rows run."""

    why: RowFailed | None = None  # it cannot

    def take(self, sends: list[Send]) -> None:
        super().take(sends)
        for send in sends:
            if isinstance(send.message, PrepareExtra):
                ready = ExtraReady(send.message.session, send.message.number, self.why)
                self.event(Received(WORKER, LIFE, ready))

    def give(self, handle: int, name: str = "", max_tokens: int = 4) -> None:
        extras = (adapter(name),) if name else ()
        ids, params = pack_i32(PROMPT), SamplingParams(max_tokens=max_tokens)
        request_id = RequestId(f"r{handle}")
        work = EngineRequest(request_id, Handle(handle), ids, params, arrival_s=float(handle), extras=extras)
        self.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))

    @property
    def running(self) -> list[int]:
        return [request.handle for request in self.core.batching.running]


def test_rows_have_no_more_adapters_than_there_are_slots() -> None:
    bench = SlotBench(limits(max_loras=2), 64, 4)
    for handle, name in enumerate(["a", "b", "c", "", "a", "c", "b", "", "d"]):
        bench.give(handle, name, max_tokens=3 + handle % 3)
    seen = Counter[int]()
    while bench.plans:
        names = {request.slot_key for request in bench.core.batching.running if request.slot_key}
        seen[len(names)] += 1
        bench.step()
    assert set(seen) <= {0, 1, 2}
    assert seen[2] > 0
    assert set(bench.ended) == set(range(9))
    bench.finish()


def test_others_pass_until_one_has_waited_too_long() -> None:
    bench = SlotBench(limits(max_loras=1, max_num_seqs=8), 64, 4)
    bench.give(0, "a", max_tokens=40)
    bench.give(1, "b")
    bench.give(2, "a", max_tokens=2)
    bench.give(3)
    for _ in range(8):
        bench.step()
    assert {2, 3} <= set(bench.ended), "an adapter that has a slot, and none"
    assert bench.running == [0]
    bench.now += PATIENCE_S
    bench.give(4, "a")
    bench.give(5)
    for _ in range(8):
        bench.step()
    assert 5 in bench.ended, "it needs no slot"
    assert 4 not in bench.running, "b has waited long enough"
    bench.finish()
    assert list(bench.ended).index(1) < list(bench.ended).index(4)


def test_an_adapter_has_blocks_of_its_own() -> None:
    bench = SlotBench(limits(max_loras=3), 64, 4)
    for handle, name in enumerate(["", "a", "b", "a", ""]):
        bench.give(handle, name)
        bench.finish()
    assert [bench.cached[handle] for handle in range(5)] == [0, 0, 0, 8, 8]


def test_one_that_cannot_be_read_ends_its_request_alone() -> None:
    bench = SlotBench(limits(), 64, 4)
    bench.why = RowFailed("the files are others", param="model")
    bench.give(0, "a")
    bench.give(1)
    bench.finish()
    assert bench.refused == {0: "model: model: the files are others"}
    assert bench.error_kinds == {0: ErrorKind.INVALID}
    assert len(bench.tokens[1]) == 4
