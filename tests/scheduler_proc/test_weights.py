"""A rank whose weights change: its requests go on, nothing that others computed is found, and it serves with the mesh's alone."""

from bench import COORDINATOR, LIFE, WORKER, Bench, limits, next_token, reference, salt_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rolling_hash import extend

from meshlm.protocol.edges.admit import Load
from meshlm.protocol.edges.step import Reset
from meshlm.protocol.operations import CheckWeights, Operation, OperationDone, OperationId, UseWeights
from meshlm.protocol.weights import WeightsVersion
from meshlm.runtime.process.events import Received, Send, Tick
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.states import Session
from meshlm.scheduler_proc.wishes import RETRY_S

PROMPT = list(range(40))


def version(number: int) -> WeightsVersion:
    return WeightsVersion(number, "", f"/{number}", f"digest {number}")


def use(bench: Bench, number: int, *, keep_kv: bool = False) -> list[OperationDone]:
    """Its answers."""
    operation = Operation(OperationId(f"use {number} at {bench.now}"), UseWeights(version(number), keep_kv))
    heard = len(bench.told)
    bench.event(Received(COORDINATOR, LIFE, operation))
    return [message for message in bench.told[heard:] if isinstance(message, OperationDone)]


def load_of(bench: Bench) -> Load:
    bench.core.load.tell_all()
    (load,) = [send.message for send in bench.core.report() if isinstance(send.message, Load)]
    return load


def is_of(token: int, before: list[int], number: int) -> bool:
    """Whether these weights give the token behind those, of which they have computed all KV."""
    state = 0
    for one in before:
        state = extend(state, one + salt_of(version(number)))
    return next_token(state) == token


def explained(prompt: list[int], tokens: list[int], newest: int) -> bool:
    """Whether each token is of one version's KV alone, none older than the token's before."""
    number = 0
    for nth, token in enumerate(tokens):
        while not is_of(token, prompt + tokens[:nth], number):
            number += 1
            if number > newest:
                return False
    return True


def test_what_runs_is_computed_anew_and_says_by_which() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, PROMPT, 20)
    for _ in range(6):
        bench.step()
    num_old = len(bench.tokens[1])
    (done,) = use(bench, 1)
    assert done.error == ""
    assert load_of(bench).weights == version(1)
    bench.finish()
    tokens = bench.tokens[1]
    assert tokens[:num_old] == reference(PROMPT, num_old)
    assert all(is_of(token, PROMPT + tokens[:nth], 1) for nth, token in enumerate(tokens) if nth >= num_old)
    assert bench.labels[1] == [(0, "0"), (num_old, "1")]
    bench.assign(2, PROMPT, 1)
    bench.finish()
    assert bench.cached[2] == 36, "what the new ones computed is found"


def test_nothing_of_other_weights_is_found() -> None:
    bench = Bench(limits(), 64, 4)
    for handle, number in ((1, 0), (2, 1), (3, 0)):
        if handle > 1:
            use(bench, number)
        bench.assign(handle, PROMPT, 1)
        bench.finish()
    assert [bench.cached[handle] for handle in (1, 2, 3)] == [0, 0, 36], "back with the first, theirs is good again"


def test_who_keeps_its_kv_goes_on_with_it_and_others_do_not_find_it() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, PROMPT, 20)
    for _ in range(6):
        bench.step()
    before = bench.core.load.prompt_tokens
    use(bench, 1, keep_kv=True)
    bench.assign(2, PROMPT, 1)
    bench.finish()
    assert bench.core.load.prompt_tokens - before < len(PROMPT) + 8, "the new request's alone"
    assert bench.cached[2] == 0
    assert bench.labels[1][-1][1] == "1"
    assert not explained(PROMPT, bench.tokens[1], 1), "old KV, new weights"


def test_a_rank_whose_worker_cannot_have_them_stays_out_and_tries_again() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, PROMPT, 20)
    bench.step()
    bench.cannot_have = "its files are gone"
    (done,) = use(bench, 1)
    assert "its files are gone" in done.error
    assert bench.core.workers.rank.session is Session.BEHIND
    load = load_of(bench)
    assert (load.serving, load.weights) == (False, version(1))
    assert "its files are gone" in load.behind
    assert not bench.plans
    check = Operation(OperationId("check"), CheckWeights("/2"))
    assert bench.core.handle(Received(COORDINATOR, LIFE, check), bench.now) == [Send(WORKER, check)]
    bench.core.handle(Received(WORKER, LIFE, OperationDone(check.id)), bench.now)
    bench.cannot_have = ""
    bench.now += RETRY_S + 1
    bench.take(bench.core.handle(Tick(0.0), bench.now))
    assert bench.core.serving
    bench.take(bench.core.plan(int(bench.now * 1e9)))
    bench.finish()
    assert bench.labels[1][-1][1] == "1"


def test_a_worker_that_comes_back_has_them_before_it_is_sent_a_plan() -> None:
    bench = Bench(limits(), 64, 4)
    use(bench, 1)
    bench.assign(1, PROMPT, 10)
    for _ in range(4):
        bench.step()
    bench.lose_worker()
    assert bench.weights == version(1)
    bench.finish()
    assert all(is_of(token, PROMPT + bench.tokens[1][:nth], 1) for nth, token in enumerate(bench.tokens[1]))


def test_a_scheduler_that_begins_takes_the_newest_of_its_workers_and_asks_the_others() -> None:
    from meshlm.protocol.edges.step import WorkerReady
    from meshlm.runtime.process.events import PeerUp

    core = Scheduler(limits(num_workers=2))
    one, two = core.workers.all
    core.handle(PeerUp(one, LIFE), 1.0)
    core.handle(PeerUp(two, LIFE), 1.0)
    for worker, has in ((one, version(0)), (two, version(3))):
        ready = WorkerReady(core.session, 64, 4, 8, 64, 997, weights=has)
        sends = core.handle(Received(worker, LIFE, ready), 2.0)
    assert {send.message.weights for send in sends if isinstance(send.message, Reset)} == {version(3)}
    assert not core.serving


@settings(deadline=None)
@given(st.lists(st.sampled_from(["step", "step", "step", "assign", "update", "back", "lose"]), max_size=40))
def test_any_history_gives_tokens_of_one_version_s_kv_each(history: list[str]) -> None:
    bench = Bench(limits(), 64, 4)
    prompts: dict[int, list[int]] = {}
    newest = handle = 0
    for what in history:
        if what == "step" and bench.plans:
            bench.step()
        elif what == "assign":
            handle += 1
            prompts[handle] = PROMPT[: 10 + handle % 7]
            bench.assign(handle, prompts[handle], 6)
        elif what in ("update", "back"):
            newest += what == "update"
            use(bench, newest)
        elif what == "lose":
            bench.lose_worker()
    bench.finish()
    for number, prompt in prompts.items():
        assert explained(prompt, bench.tokens[number], newest), bench.labels[number]
