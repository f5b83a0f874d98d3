"""The detokenizer, the real coordinator and two schedulers; links without order among each other; kill -9 at any moment.

Every request gets its tokens once and right, and one end, which is none of an error: nothing hangs, nothing is given up.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from mortal_mesh import DETOKENIZER, MORTALS, SCHEDULERS, FakeScheduler, World, truth

from meshlm.protocol.wire.ids import FinishReason, RequestId
from meshlm.runtime.process.deaths import MAX_DEATHS


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_death_is_seen_in_what_comes(data: st.DataObject) -> None:
    any_history(World(), data)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_death_is_seen_where_prompts_are_handed_off(data: st.DataObject) -> None:
    any_history(World(num_prefill_ranks=1), data)


def test_a_prompt_is_handed_off_where_nobody_dies() -> None:
    world = World(num_prefill_ranks=1)
    while possible := world.possible():
        world.happen(*possible[0])
    world.send(DETOKENIZER, world.detokenizer.submit(4))
    while possible := world.possible():
        world.happen(*possible[0])
    first = world.processes[SCHEDULERS[0]]
    assert isinstance(first, FakeScheduler)
    assert first.num_handed_off == 1
    assert world.detokenizer.tokens[RequestId("r")] == [truth("r", index) for index in range(4)]


def any_history(world: World, data: st.DataObject) -> None:
    """Whatever happens, every request gets its tokens and its end."""
    detokenizer = world.detokenizer
    num_kills = 0
    for _ in range(data.draw(st.integers(0, 120))):
        possible = world.possible()
        action = data.draw(st.integers(0, 19))
        if action == 0 and num_kills < MAX_DEATHS - 1:
            alive = [identity for identity in MORTALS if identity in world.processes]
            if alive:
                num_kills += 1
                world.kill(data.draw(st.sampled_from(alive)), data)
        elif action == 1:
            dead = [identity for identity in MORTALS if identity not in world.processes]
            if dead:
                world.start(data.draw(st.sampled_from(dead)))
        elif action == 5 and num_kills < MAX_DEATHS - 1 and (whole := world.whole()):
            num_kills += 1
            world.cut(*data.draw(st.sampled_from(whole)))
        elif action in (2, 3) and len(detokenizer.names) < 5:
            world.send(DETOKENIZER, detokenizer.submit(data.draw(st.integers(1, 4))))
        elif action == 4 and detokenizer.names:
            world.send(DETOKENIZER, detokenizer.abort(data.draw(st.sampled_from(detokenizer.names))))
        elif possible:
            world.happen(*data.draw(st.sampled_from(possible)))
    for identity in MORTALS:
        if identity not in world.processes:
            world.start(identity)
    while possible := world.possible():
        world.happen(*possible[0])
    for name in detokenizer.names:
        if name not in detokenizer.gone:
            assert detokenizer.ends.get(name) is FinishReason.LENGTH
            got = detokenizer.tokens[name]
            assert got == [truth(name, index) for index in range(len(got))]
    assert not detokenizer.core.journal.by_id
