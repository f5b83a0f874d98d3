"""The media process's core: any history of questions, cancels, deaths, doubled and late answers, with a check after each event."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from media_bench import BAD, FRONTENDS, SIZE, Bench, digest_of, source

from meshlm.mediaproc import core as core_module
from meshlm.mediaproc.core import FORGOTTEN
from meshlm.mediaproc.events import Drop, Found, Keep, Listed, Skipped
from meshlm.mediaproc.turns import ROOM_WAIT_S
from meshlm.protocol.edges.media import LEASE_S
from meshlm.protocol.wire.ids import ErrorKind, Incarnation
from meshlm.runtime.process.events import PeerLost

IMAGES = st.sampled_from([b"a", b"b", b"c", b"d", b"e", BAD])
ACTIONS = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 1), st.lists(IMAGES, min_size=1, max_size=3)),
    st.tuples(st.just("fetch"), st.integers(0, 1), IMAGES),
    st.tuples(st.just("name"), st.integers(0, 1), st.sampled_from([b"a", b"b"])),
    st.tuples(st.just("cancel"), st.integers(0, 1), st.integers(0, 5)),
    st.tuples(st.just("die"), st.integers(0, 1), st.none()),
    st.tuples(st.just("step"), st.integers(0, 9), st.none()),
    st.tuples(st.just("do"), st.integers(0, 9), st.none()),
    st.tuples(st.just("tell"), st.integers(0, 9), st.none()),
    st.tuples(st.just("again"), st.integers(0, 9), st.none()),
    st.tuples(st.sampled_from(["say", "cancel all"]), st.integers(0, 1), st.none()),
    st.tuples(st.just("renew"), st.just(0), st.lists(IMAGES, max_size=3)),
    st.tuples(st.just("later"), st.sampled_from([1, 30, 61]), st.none()),
    st.tuples(st.just("vanish"), st.integers(0, 5), st.none()),
)


@settings(max_examples=600, deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_any_history(actions: list[tuple[str, int, object]]) -> None:
    """Every question has one answer, with the items of its own images, whose files are there; the files stay within their bytes."""
    bench, next_handle = Bench(), dict.fromkeys(FRONTENDS, 0)
    for name, number, more in actions:
        frontend = FRONTENDS[number % 2]
        if name in ("read", "fetch", "name"):
            next_handle[frontend] += 1
            handle = next_handle[frontend]
        match name:
            case "read":
                assert isinstance(more, list)
                bench.read(frontend, handle, *more)
            case "fetch":
                assert isinstance(more, bytes)
                bench.ask(frontend, handle, [source(b"", url=more.decode())], [more])
            case "name":
                assert isinstance(more, bytes)
                bench.ask(frontend, handle, [source(b"", uuid=more.decode())], [more])
                if not bench.answers or bench.answers[-1].error:
                    bench.ask(frontend, handle + 1000, [source(more, uuid=more.decode())], [more])
            case "cancel":
                assert isinstance(more, int)
                bench.cancel(frontend, next_handle[frontend] - more)
            case "die":
                bench.die(frontend)
                next_handle[frontend] = 0
            case "step" if bench.work:
                bench.step(number)
            case "do" if bench.work:
                bench.do(number)
            case "tell" if bench.untold:
                bench.event(bench.untold.pop(number % len(bench.untold)))
            case "again" if bench.done and bench.done[number % len(bench.done)] not in bench.untold:
                bench.say_again(number)
            case "renew":
                assert isinstance(more, list)
                bench.renew(*more)
            case "say":
                bench.say(frontend)
            case "cancel all":
                for one in range(1, next_handle[frontend] + 1):
                    bench.cancel(frontend, one)
            case "later":
                bench.later(number)
            case "vanish" if kept := [name for name in bench.files if not name.endswith(".part")]:
                bench.vanished.add(kept[number % len(kept)])
                del bench.files[kept[number % len(kept)]]
                bench.event(Listed(frozenset(bytes.fromhex(one) for one in bench.files if not one.endswith(".part"))))
    bench.finish()
    bench.later(ROOM_WAIT_S)  # for room, at most
    bench.finish()
    assert not bench.asked, "questions without an answer"
    assert not bench.core.asked
    assert not bench.core.jobs
    assert bench.core.num_waiting_bytes == 0
    bench.later(LEASE_S)
    assert bench.core.files.num_held == 0, "held by nobody"
    assert not [name for name in bench.files if name.endswith(".part")], "unfinished files were left"


def test_a_new_incarnations_question_is_not_answered_by_the_old_ones_image() -> None:
    """Both have the same handle, and the old one's image is made only now."""
    bench = Bench()
    bench.read(FRONTENDS[0], 1, b"theirs")
    bench.step()
    (made,) = [bench.outcome(effect) for effect in bench.work]
    bench.work.clear()
    bench.die(FRONTENDS[0])
    bench.read(FRONTENDS[0], 1, b"mine")
    assert Keep("1.part", digest_of(b"theirs")) in bench.event(made)
    assert not bench.answers
    bench.finish()
    assert [item.digest for item in bench.answers[0].items] == [digest_of(b"mine")]


def test_the_loss_of_an_incarnation_that_is_told_late_harms_not_the_next() -> None:
    bench = Bench()
    bench.lives[FRONTENDS[0]] = 2
    bench.read(FRONTENDS[0], 1, b"a")
    bench.event(PeerLost(FRONTENDS[0], Incarnation(1)))
    bench.finish()
    assert len(bench.answers) == 1


def test_who_comes_for_an_image_that_a_thread_has_just_skipped_has_it_all_the_same() -> None:
    bench = Bench()
    bench.read(FRONTENDS[0], 1, b"a")
    bench.step()
    bench.cancel(FRONTENDS[0], 1)
    skipped = bench.outcome(bench.work.pop())
    assert isinstance(skipped, Skipped)
    bench.read(FRONTENDS[1], 1, b"a")
    bench.step()
    bench.event(skipped)
    bench.finish()
    assert not bench.answers[0].error


def test_what_nobody_waits_for_is_forgotten() -> None:
    bench = Bench()
    bench.read(FRONTENDS[0], 1, b"a")
    bench.cancel(FRONTENDS[0], 1)
    bench.finish()
    assert not bench.core.jobs
    assert not bench.done


def test_files_that_are_held_stay_and_an_image_waits_for_the_first_that_is_free() -> None:
    bench = Bench()
    for handle, data in enumerate((b"a", b"b", b"c"), 1):
        bench.read(FRONTENDS[0], handle, data)
    bench.read(FRONTENDS[0], 4, b"d")
    bench.read(FRONTENDS[1], 1, b"e")
    bench.finish()
    assert len(bench.answers) == 3
    assert bench.core.turns.num_waiting_for_room == 2
    bench.later(30)
    bench.say(FRONTENDS[0])
    bench.cancel(FRONTENDS[0], 2)
    assert [answer.handle for answer in bench.answers] == [1, 2, 3, 4]
    assert bench.files.keys() - {"4.part", "5.part"} == {digest_of(data).hex() for data in (b"a", b"c", b"d")}
    bench.cancel(FRONTENDS[0], 1)
    bench.finish()
    assert (bench.answers[-1].handle, bench.answers[-1].error) == (1, "")
    bench.renew(b"b", b"e")
    assert bench.gone == [digest_of(b"b")]


def test_an_image_that_finds_no_room_for_long_is_refused() -> None:
    bench = Bench()
    for handle, data in enumerate((b"a", b"b", b"c", b"d", b"e"), 1):
        bench.read(FRONTENDS[0], handle, data)
    bench.finish()
    for _ in range(int(ROOM_WAIT_S // 10)):
        bench.later(10)
        bench.say(FRONTENDS[0])
    bench.later(4)
    assert len(bench.answers) == 3
    bench.later(1)
    assert [(answer.kind, "--mm-processor-cache-gb" in answer.error) for answer in bench.answers[3:]] == [
        (ErrorKind.OVERLOADED, True)
    ] * 2
    assert not [name for name in bench.files if name.endswith(".part")]


def test_what_a_dead_frontend_held_is_free_once_its_lease_has_ended() -> None:
    bench = Bench()
    bench.read(FRONTENDS[0], 1, b"a", b"b", b"c")
    bench.finish()
    bench.die(FRONTENDS[0])
    bench.renew(b"a")
    bench.read(FRONTENDS[1], 1, b"d")
    bench.finish()
    bench.later(LEASE_S - 1)
    assert len(bench.answers) == 1, "its requests may run on elsewhere"
    bench.renew(b"a")
    bench.later(1)
    assert not bench.answers[1].error
    assert digest_of(b"a").hex() in bench.files, "a detokenizer holds it"


def test_one_request_with_more_than_all_room_is_refused_at_once() -> None:
    bench = Bench()
    bench.read(FRONTENDS[0], 1, b"a", b"b", b"c", b"d")
    bench.read(FRONTENDS[1], 1, b"e")
    bench.finish()
    assert [(answer.handle, answer.kind) for answer in bench.answers if answer.error] == [(1, ErrorKind.INVALID)]
    assert len(bench.answers) == 2


def test_those_who_wait_for_room_have_few_files_and_leave_none() -> None:
    bench = Bench()
    for handle in range(1, 20):
        bench.read(FRONTENDS[0], handle, b"%d" % handle)
        bench.finish()
    assert len(bench.files) <= 3 + 4
    for handle in range(4, 20):
        bench.cancel(FRONTENDS[0], handle)
    bench.later(1)
    bench.finish()
    assert len(bench.files) == 3
    assert not bench.core.jobs


def test_what_is_larger_than_all_room_is_refused() -> None:
    bench = Bench(room=SIZE - 1)
    bench.read(FRONTENDS[0], 1, b"a")
    bench.finish()
    assert bench.answers[0].kind is ErrorKind.INVALID
    assert not bench.files


def test_files_of_the_incarnation_before_are_taken_over_as_far_as_there_is_room() -> None:
    bench = Bench()
    found = [digest_of(bytes([65 + number])) for number in range(4)]
    bench.files = {digest.hex(): SIZE for digest in found}
    effects = bench.core.handle(Found(tuple((digest, SIZE) for digest in found)), 0.0)
    assert effects == [Drop(found[3].hex())]
    assert len(bench.core.files) == 3
    bench.files.pop(found[3].hex())
    bench.renew(b"A", b"D")
    assert bench.gone == [digest_of(b"D")]


def test_too_many_bytes_that_wait_are_refused() -> None:
    bench = Bench()
    large = bytes(core_module.MAX_WAITING_BYTES // 2 + 1)
    bench.ask(FRONTENDS[0], 1, [source(large)], [large])
    bench.ask(FRONTENDS[0], 2, [source(large)], [large])
    assert [(answer.handle, answer.kind) for answer in bench.answers] == [(2, ErrorKind.OVERLOADED)]


def test_a_name_without_its_image_is_refused_once_that_is_gone() -> None:
    bench = Bench()
    bench.ask(FRONTENDS[0], 1, [source(b"a", uuid="cat")], [b"a"])
    bench.finish()
    bench.ask(FRONTENDS[0], 2, [source(b"", uuid="cat")], [b"a"])
    assert not bench.answers[-1].error
    bench.vanished |= bench.files.keys()
    bench.files.clear()
    bench.event(Listed(frozenset()))
    bench.ask(FRONTENDS[0], 3, [source(b"", uuid="cat"), source(b"b")], [b"a", b"b"])
    assert FORGOTTEN in bench.answers[-1].error
    bench.finish()
    assert array("i", [answer.handle for answer in bench.answers]).tolist() == [1, 2, 3]
