"""The ring in which a process notes what it does."""

from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.process.timeline import MAX_SPANS, Timeline

ME = Identity(Role.WORKER)


def test_spans_are_told_once_and_only_while_it_is_on() -> None:
    timeline = Timeline(ME)
    assert not timeline.on
    timeline.begin(1)
    timeline.note("step", "device", 5, 9, 77, {"step": 3})
    timeline.note("launch", "stepper", 5)
    part = timeline.end(1)
    assert part is not None
    assert (part.process, part.num_lost, len(part.spans)) == (ME, 0, 2)
    assert (part.spans[0].end_ns, part.spans[0].flow) == (9, 77)
    assert part.spans[1].end_ns > 5
    assert not timeline.on
    assert timeline.end(1) is None


def test_a_newer_recording_ends_the_older() -> None:
    timeline = Timeline(ME)
    timeline.begin(1)
    timeline.note("a", "loop", 1)
    timeline.begin(2)
    assert timeline.end(1) is None
    assert timeline.on
    part = timeline.end(2)
    assert part is not None
    assert part.spans == ()


def test_the_ring_keeps_the_newest_and_says_what_it_lost() -> None:
    timeline = Timeline(ME)
    timeline.begin(1)
    for number in range(MAX_SPANS + 5):
        timeline.note("a", "loop", number + 1, number + 2)
    part = timeline.end(1)
    assert part is not None
    assert (len(part.spans), part.num_lost, part.spans[0].begin_ns) == (MAX_SPANS, 5, 6)
