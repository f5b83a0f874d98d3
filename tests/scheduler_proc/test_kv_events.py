"""A rank's events stay true through whatever happens to it: deaths, resets, steps that fail, memory that is short."""

from bench import COORDINATOR, DETOKENIZER, LIFE, WORKER, Bench, limits, reference
from cache_subscriber import Subscriber
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.edges.step import StepFailed
from meshlm.protocol.kv_events import AllBlocksCleared, hash_of
from meshlm.protocol.operations import Operation, OperationId, ResetPrefixCache
from meshlm.runtime.process.events import PeerLost, PeerUp, Received
from meshlm.scheduler_proc.core import Scheduler


class Followed(Bench):
    """A bench whose events somebody follows."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(limits(max_model_len=64, max_crashes=99, kv_events=True), num_blocks, 4)
        self.subscriber = Subscriber()
        self.has_heir = False
        self.num_operations = 0

    def look(self) -> None:
        """What the subscriber knows is there; all that is there, where no heir was given keys without tokens."""
        self.subscriber.apply(self.core.kv_events())
        known = {name for name, _ in self.subscriber.known}
        cached = {hash_of(key) for key in self.core.batching.kv.pool._cached}
        assert known <= cached
        if self.core.serving:
            assert self.has_heir or known == cached

    def take_over(self) -> None:
        """Another scheduler, for whose requests nobody asks again."""
        self.core = Scheduler(self.limits)
        self.plans.clear()
        self.tokens.clear()
        self.take(self.core.handle(PeerUp(DETOKENIZER, LIFE), self.now))
        self.event(PeerUp(WORKER, LIFE))
        self.has_heir = True

    def reset_prefix_cache(self) -> None:
        self.num_operations += 1
        operation = Operation(OperationId(str(self.num_operations)), ResetPrefixCache(True))
        self.event(Received(COORDINATOR, LIFE, operation))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_history(data: st.DataObject) -> None:
    draw = data.draw
    bench = Followed(draw(st.integers(16, 24)))
    for handle in range(draw(st.integers(5, 40))):
        match draw(
            st.sampled_from(["assign", "assign", "step", "step", "step", "worker", "scheduler", "reset", "fail"])
        ):
            case "assign":
                prompt = [*range(draw(st.integers(0, 20))), *draw(st.lists(st.integers(0, 9), min_size=1, max_size=20))]
                bench.assign(handle, prompt, draw(st.integers(1, 64 - len(prompt))))
            case "step" if bench.plans:
                bench.step()
            case "worker":
                bench.lose_worker()
                bench.look()
                assert not bench.subscriber.known or bench.plans, "only what was planned since"
            case "scheduler":
                bench.take_over()
            case "reset":
                bench.reset_prefix_cache()
                bench.has_heir = False
            case "fail" if bench.plans:
                bench.directory.spoil()
                bench.event(Received(WORKER, LIFE, StepFailed(bench.core.session, bench.plans[0].step, "broken")))
        if draw(st.booleans()):
            bench.look()
    bench.look()


def test_what_a_rank_says_of_a_life() -> None:
    prompt = [*range(20)]
    bench = Followed(24)
    bench.assign(1, prompt, 9)
    bench.finish()
    bench.look()
    assert len(bench.subscriber.known) == 7, "of 28 tokens; the last one was not computed"
    tokens = [token for _, (_, block, _) in bench.subscriber.known.items() for token in block]
    assert tokens == [*prompt, *reference(prompt, 8)]
    bench.take_over()
    assert bench.core.kv_events() == [AllBlocksCleared()]
    bench.subscriber.known.clear()
    bench.assign(2, prompt, 9)
    bench.finish()
    assert bench.cached[2] == 16
    bench.look()
    assert len(bench.subscriber.known) == 7
    bench.event(PeerLost(WORKER, LIFE))
    assert bench.core.kv_events() == [AllBlocksCleared()], "at once, not when another worker is there"


def test_nothing_is_said_without_the_setting() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, [*range(20)], 9)
    bench.finish()
    assert bench.core.kv_events() == []
