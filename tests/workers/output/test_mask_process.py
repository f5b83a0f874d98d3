"""The process of a worker's matchers: masks are what matchers make, a row that ends it is alone, and a worker's threads run on."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from byte_vocabulary import apply_plan
from grammar_bombs import chain_of_objects
from llguidance import LLMatcher

from meshlm.protocol.edges.step import NewRow, RowFailed, StepPlan
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import ErrorKind, Row, StepId
from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.sandbox.limits import MIB, ChildDied, Limit, Limits
from meshlm.runtime.vocabulary import Vocabulary
from meshlm.workers.output import grammars as grammars_module
from meshlm.workers.output import mask_process
from meshlm.workers.output.grammars import Grammars, MatchersLost
from meshlm.workers.output.mask_process import MaskProcess
from meshlm.workers.output.matchers import Matchers, RowBegins, Turn, Turned
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.step_columns import COMPUTED, Drafts, columns_of

pytestmark = pytest.mark.model
VOCAB, EOS = 49152, 2
DIGITS, LETTERS = LLMatcher.grammar_from_regex("[0-9]{40}"), LLMatcher.grammar_from_regex("[a-z]+")
SCHEMA = LLMatcher.grammar_from_json_schema(json.dumps({"type": "array", "items": {"enum": ["x", 1, None]}}))
BOMB = LLMatcher.grammar_from_json_schema(json.dumps(chain_of_objects(12_000)))


def resolved(smollm2: Path) -> Any:
    return SimpleNamespace(tokenizer_path=str(smollm2), spec=SimpleNamespace(vocab_size=VOCAB), eos_token_ids=(EOS,))


@pytest.fixture(scope="module")
def process(smollm2: Path) -> Iterator[MaskProcess]:
    made = MaskProcess(resolved(smollm2))
    yield made
    made.close()


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return Vocabulary(tokenizer_files.load(smollm2), VOCAB, (EOS,))


def new(row: int, text: str, output: tuple[int, ...] = (), **params: Any) -> NewRow:
    grammar, sampling = Grammar(GrammarKind.COMPILED, text, "field"), SamplingParams(eos_token_ids=(EOS,), **params)
    return NewRow(Row(row), np.array([5, *output], np.int32).tobytes(), 1, b"", sampling, (grammar,))


def plan(*news: NewRow, removed: tuple[int, ...] = ()) -> StepPlan:
    gone = np.array(removed, np.int32).tobytes()
    return StepPlan(1, StepId(1), b"", b"", b"", b"", 0, removed_rows=gone, new_rows=list(news))


def stepped(made: Grammars, rows: list[int], seed: int) -> tuple[list[bytes], dict[int, str]]:
    """Draws a token for each row; the masks, and what failed by row."""
    constraint = made.of_step(np.array(rows, np.int32))
    mask = constraint.mask()
    assert mask is not None
    dice = np.random.default_rng(seed)
    tokens = np.array([dice.choice(np.flatnonzero(line)) for line in mask.allowed(VOCAB)], np.int32)
    constraint.after_head(tokens, COMPUTED)
    return [line.tobytes() for line in mask.words], {rows[line]: why.message for line, why in constraint.failed.items()}


def test_masks_are_those_of_the_matchers(process: MaskProcess, vocabulary: Vocabulary) -> None:
    """Of rows that come, go, begin anew and are replaced; at the child's threads, too."""
    both = Grammars(process), Grammars(Matchers(lambda: vocabulary))
    texts = [(DIGITS, LETTERS, SCHEMA)[row % 3] for row in range(12)]
    for text in {*texts}:
        assert [made.compile(text) for made in both] == ["", ""]
    for made in both:
        apply_plan(made, plan(*(new(row, text) for row, text in enumerate(texts))))
    for step in range(30):
        rows = [row for row in range(12) if (row + step) % 4]
        one, other = (stepped(made, rows, step) for made in both)
        assert one == other
        again = step % 12
        for made in both:
            made.advance()
            apply_plan(
                made, plan(new(again, texts[again], tuple(made.rows[again].output)), removed=((again + 1) % 12,))
            )
            apply_plan(made, plan(new((again + 1) % 12, texts[(again + 1) % 12], min_tokens=3)))
    for made in both:
        made.reset()


def verified(made: Grammars, letters: list[int], num_rows: int, seed: int) -> tuple[list[bytes], dict[int, RowFailed]]:
    """A step whose rows have drafts, of which some are accepted; the masks, and what failed."""
    dice = np.random.default_rng(seed)
    counts = dice.integers(0, 5, num_rows).astype(np.int32)
    rows = np.arange(num_rows, dtype=np.int32)
    step = columns_of(rows, rows * 0, 1 + counts)
    step.drafts = Drafts(counts, dice.choice(letters, counts.sum()).astype(np.int32))
    constraint = made.of_step(rows, step)
    mask = constraint.mask()
    assert mask is not None
    allowed, tokens, given, line, at = mask.allowed(VOCAB), list[int](), list[int](), 0, 0
    for count in counts.tolist():
        drafts = step.drafts.tokens[at : at + count].tolist()
        right = next((nth for nth, token in enumerate(drafts) if not allowed[line + nth][token]), count)
        given.append(int(dice.integers(0, right + 2)))
        tokens += [*drafts[: given[-1] - 1], int(dice.choice(np.flatnonzero(allowed[line + given[-1] - 1])))][
            : given[-1]
        ]
        line, at = line + 1 + count, at + count
    constraint.after_head(np.array(tokens, np.int32), COMPUTED, np.array(given, np.int32))
    return [words.tobytes() for words in mask.words], constraint.findings().failed


def test_masks_behind_drafts_go_the_same_way(
    process: MaskProcess, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one message or several; and whatever ends the process in the middle."""
    letters = [vocabulary.tokens_of(bytes([byte]))[0] for byte in b"0149abc"]
    monkeypatch.setattr(process, "_most_lines", 7)
    both = Grammars(process), Grammars(Matchers(lambda: vocabulary))
    for made in both:
        apply_plan(made, plan(*(new(row, (DIGITS, LETTERS, SCHEMA)[row % 3]) for row in range(9))))
    for seed in range(20):
        if seed % 5 == 4:
            os.kill(process._opened().child.pid, signal.SIGKILL)
        one, other = (verified(made, letters, 9, seed) for made in both)
        assert one == other


def test_what_cannot_be_compiled_is_told(process: MaskProcess) -> None:
    assert "regex" in process.compile(LLMatcher.grammar_from_regex("(a"))
    assert process.compile(DIGITS) == ""
    assert process.compile("") == ""


def test_a_grammar_that_ends_the_process_is_refused_and_rows_go_on(
    process: MaskProcess, vocabulary: Vocabulary
) -> None:
    """The detokenizer refuses it before; here nothing is trusted either."""
    made, alone = Grammars(process), Grammars(Matchers(lambda: vocabulary))
    for each in (made, alone):
        apply_plan(each, plan(new(0, DIGITS), new(1, SCHEMA)))
    assert stepped(made, [0, 1], 1) == stepped(alone, [0, 1], 1)
    assert "nested too deeply" in made.compile(BOMB)
    assert stepped(made, [0, 1], 2) == stepped(alone, [0, 1], 2)
    apply_plan(made, plan(new(2, BOMB)))
    masks, failed = stepped(made, [0, 1, 2], 3)
    assert failed.keys() == {2}
    assert "nested too deeply" in failed[2]
    assert masks[:2] == stepped(alone, [0, 1], 3)[0]
    assert stepped(made, [0, 1, 2], 4)[1] == failed  # a step that was planned before


def test_whatever_ends_the_process_rows_go_on(process: MaskProcess, vocabulary: Vocabulary) -> None:
    made, alone = Grammars(process), Grammars(Matchers(lambda: vocabulary))
    for each in (made, alone):
        apply_plan(each, plan(new(0, DIGITS), new(1, LETTERS)))
    for step in range(4):
        os.kill(process._opened().child.pid, signal.SIGKILL)
        assert stepped(made, [0, 1], step) == stepped(alone, [0, 1], step)


def test_masks_that_take_too_long_end_their_row(process: MaskProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time counts, of one answer."""
    session = process._opened()
    monkeypatch.setattr(mask_process, "LOOK_S", 0.01)
    monkeypatch.setattr(mask_process, "MOST_CPU_S", -1.0)
    grammar, output = Grammar(GrammarKind.COMPILED, DIGITS, "field"), np.zeros(3_000_000, np.int32).tobytes()
    turn = Turn([1], [RowBegins(1, SamplingParams(eos_token_ids=(EOS,)), grammar, output)])
    with pytest.raises(MatchersLost, match="CPU time") as lost:
        process.turn(turn, np.zeros((1, process.num_words), np.int32))
    assert lost.value.by_grammar
    assert process._session is not session


class Dying(Matchers):
    """A backend that ends with certain rows."""

    num_words = 1

    def __init__(self, *deadly: int, by_grammar: bool = True, deadly_drafts: bool = False) -> None:
        self.deadly, self._by_grammar, self._has = set(deadly), by_grammar, set[int]()
        self._deadly_drafts = deadly_drafts  # the rows end it by their drafts alone
        self.num_deaths = 0

    def start(self) -> None: ...

    def compile(self, text: str) -> str:
        return text

    def turn(self, turn: Turn, words: I32) -> Turned:
        self._has |= {begins.number for begins in turn.begins}
        assert {*turn.wanted, *(number for number, _ in turn.pushed)} <= self._has, "of a row that it has not"
        assert len(words) == sum(turn.num_lines)
        if self.deadly & {*(turn.drafts if self._deadly_drafts else turn.wanted)}:
            self._has.clear()
            self.num_deaths += 1
            raise MatchersLost("it ended", by_grammar=self._by_grammar)
        words[:] = 7
        return Turned()


def test_the_row_at_fault_is_found() -> None:
    backend = Dying(2)
    made = Grammars(backend)
    apply_plan(made, plan(*(new(row, "") for row in range(4))))
    for _ in range(3):
        constraint = made.of_step(np.arange(4, dtype=np.int32))
        mask = constraint.mask()
        assert mask is not None
        assert constraint.failed == {1: RowFailed("it ended")}
        assert mask.words[:, 0].tolist() == [7, -1, 7, 7]
    assert backend.num_deaths == 2


@pytest.mark.parametrize("num_given", [0, 1, 2])
def test_a_row_whose_drafts_end_the_process_fails_only_if_they_are_accepted(num_given: int) -> None:
    made = Grammars(Dying(2, deadly_drafts=True))
    apply_plan(made, plan(*(new(row, "") for row in range(4))))
    rows, counts = np.arange(4, dtype=np.int32), np.array([1, 2, 0, 1], np.int32)
    for _ in range(3):
        step = columns_of(rows, rows * 0, 1 + counts)
        step.drafts = Drafts(counts, np.arange(4, dtype=np.int32))
        constraint = made.of_step(rows, step)
        mask = constraint.mask()
        assert mask is not None
        assert mask.words[:, 0].tolist() == [7, 7, 7, -1, -1, 7, 7, 7]
        given = np.array([1, num_given, 1, 1], np.int32)
        constraint.after_head(np.arange(given.sum(), dtype=np.int32), COMPUTED, given)
        assert constraint.findings().failed == ({1: RowFailed("it ended")} if num_given == 2 else {})


def test_a_row_that_is_there_again_and_again_is_given_up() -> None:
    backend = Dying(1, by_grammar=False)
    made = Grammars(backend)
    apply_plan(made, plan(new(0, ""), new(1, "")))
    constraint = made.of_step(np.arange(2, dtype=np.int32))
    constraint.mask()
    assert constraint.failed == {0: RowFailed("it ended; try again", ErrorKind.OVERLOADED)}
    assert backend.num_deaths <= 2 + grammars_module.MOST_DEATHS


def test_time_to_begin_anew_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "ANEW_S", -1.0)
    made = Grammars(Dying(1))
    apply_plan(made, plan(new(0, ""), new(1, "")))
    constraint = made.of_step(np.arange(2, dtype=np.int32))
    constraint.mask()
    assert constraint.failed.keys() == {0, 1}
    assert {failed.kind for failed in constraint.failed.values()} == {ErrorKind.OVERLOADED}


def test_the_vocabulary_is_loaded_elsewhere(smollm2: Path) -> None:
    """This interpreter's other threads run on: a heartbeat is never late for it."""
    made = MaskProcess(resolved(smollm2))
    latest = [0.0]
    done = threading.Event()

    def beat() -> None:
        before = time.monotonic()
        while not done.wait(0.005):
            latest[0], before = max(latest[0], time.monotonic() - before), time.monotonic()

    heart = threading.Thread(target=beat)
    heart.start()
    before = time.process_time()
    assert made.compile(DIGITS) == ""
    took = time.process_time() - before
    done.set()
    heart.join()
    made.close()
    assert took < 0.2, "the work was done here"
    assert latest[0] < 1.0


@pytest.mark.parametrize("spin_s", [0.0, 60.0])
def test_what_comes_is_seen_by_who_sleeps_and_by_who_looks(spin_s: float) -> None:
    """Messages of any length, in pieces, and the end."""
    ours, theirs = socket.socketpair()
    messages = [b"", b"a", bytes(mask_process.PIECE), os.urandom(3 * mask_process.PIECE + 1)]

    def answer() -> None:
        with theirs:
            for message in messages:
                assert mask_process.comes(theirs, None, spin_s)
                assert mask_process.receive(theirs) == message
                mask_process.send(theirs, message[::-1])

    other = threading.Thread(target=answer)
    other.start()
    with ours:
        for message in messages:
            mask_process.send(ours, message)
            assert mask_process.comes(ours, 60.0, spin_s)
            assert mask_process.receive(ours) == message[::-1]
        assert mask_process.comes(ours, 60.0, spin_s)
        assert mask_process.receive(ours) is None
    other.join()


def test_who_looks_sleeps_soon() -> None:
    """A core is not kept by a process that has nothing to do; nor does anybody look where there are few."""
    assert mask_process.SPIN_S <= 0.005
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = time.thread_time()
        assert not mask_process.comes(ours, 0.5, 0.005)
        assert time.thread_time() - before < 0.1


def test_few_cores_are_left_to_others() -> None:
    script = (
        "import os; os.sched_getaffinity = lambda _: set(range({})); "
        "from meshlm.workers.output.mask_process import SPIN_S; print(SPIN_S)"
    )
    found = [
        subprocess.run([sys.executable, "-P", "-c", script.format(cores)], check=True, cwd="/", capture_output=True)
        for cores in (2, 7, 8)
    ]
    assert [float(each.stdout) > 0 for each in found] == [False, False, True]


def test_the_process_has_no_torch() -> None:
    """Nor has the fork server: its pages are those of the vocabulary."""
    script = "import sys, meshlm.workers.output.mask_child; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", script], check=True, cwd="/")


def test_limits_leave_room_for_what_the_detokenizer_lets_pass() -> None:
    from meshlm.detokenizer.grammar_threads import LIMITS as narrow

    wide: Limits = mask_process.LIMITS
    assert wide.stack_bytes >= 8 * narrow.stack_bytes
    assert wide.memory_bytes >= 8 * narrow.memory_bytes
    assert narrow.cpu_s * 2 <= mask_process.MOST_CPU_S
    assert wide.memory_bytes > 1024 * MIB


def test_a_grammar_is_compiled_whatever_ends_the_process_meanwhile(
    process: MaskProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of a row that end it take the grammar with them that is compiled in it: that is no refusal."""
    real, killed = mask_process.send, list[int]()

    def send(connected: Any, message: bytes) -> None:
        if len(killed) < 2:
            session = process._opened()
            killed.append(session.child.pid)
            process._drop(session)
        real(connected, message)

    monkeypatch.setattr(mask_process, "send", send)
    assert process.compile(LETTERS) == ""
    assert len({*killed, process._opened().child.pid}) == 3


@pytest.mark.parametrize(("limit", "is_busy"), [(limit, limit in (Limit.WALL, Limit.KILLED)) for limit in Limit])
def test_a_grammar_is_at_fault_only_for_what_it_does(
    process: MaskProcess, monkeypatch: pytest.MonkeyPatch, limit: Limit, is_busy: bool
) -> None:
    """A busy host, or one without memory, says nothing of it; its client is to try again."""

    def ask(*arguments: object) -> bytes:
        raise ChildDied(limit, "it ended")

    monkeypatch.setattr(mask_process._Session, "ask", ask)
    if not is_busy:
        assert process.compile(LETTERS) == "it ended"
        return
    with pytest.raises(MatchersLost) as lost:
        process.compile(LETTERS)
    assert lost.value.failed == RowFailed("it ended; try again", ErrorKind.OVERLOADED)


def test_a_host_without_room_for_the_process_is_no_fault_of_the_grammar(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memfd_create(name: str) -> int:
        raise OSError(24, "Too many open files")

    made = MaskProcess(resolved(smollm2))
    monkeypatch.setattr(os, "memfd_create", memfd_create)
    with pytest.raises(MatchersLost, match="Too many open files") as lost:
        made.compile(DIGITS)
    assert lost.value.failed.kind is ErrorKind.OVERLOADED
    made.close()
