"""Seeded random histories of a whole mesh: processes die, connections break, links crawl, clients hang up.

In every history each client gets what an undisturbed run gives, once, in order, with one end; every core's check() holds after
every event; and when the faults are over the mesh is whole again, and empty.

    MESHLM_SIM_SEED=N         play history N alone and print its story when it goes wrong
    MESHLM_SIM_HISTORIES=N    play N histories instead of those of 10,000 that choice.py finds (MESHLM_SIM_FIRST: the first seed)
    MESHLM_SIM_ALL=1          with the faults that are known to be too much (faults.py: OFF)
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from choice import chosen
from faults import OFF, Kind, Shape
from history import History, shrunk, violation
from mock_worker import Computed, Model
from msgspec.structs import replace
from replaced import simulated
from scenario import STATES, make, with_roles

from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.kv import ChunkedAttention, FullAttention, KVSpec, SlidingWindow
from meshlm.protocol.pool import PoolKind

FIRST = int(os.environ.get("MESHLM_SIM_FIRST", "0"))
WANTED = os.environ.get("MESHLM_SIM_HISTORIES")
DRAWN = 10_000
PLAY = Path(__file__).with_name("play.py")
PLAYERS = min(2, len(os.sched_getaffinity(0)))
LIMIT_S = 900
KILLS_OF_RANKS = (Kind.KILL_WORKER, Kind.KILL_SCHEDULER, Kind.KILL_COORDINATOR)
OTHER_DEATHS = (Kind.KILL_SCHEDULER, Kind.KILL_COORDINATOR, Kind.KILL_DETOKENIZER, Kind.SLOW)


@pytest.mark.timeout(LIMIT_S + 60)
def test_any_history_gives_every_client_its_tokens_and_leaves_nothing_behind() -> None:
    if wanted := os.environ.get("MESHLM_SIM_SEED"):
        if violation(make(int(wanted))):
            tell(int(wanted))
        return
    seeds = range(FIRST, FIRST + int(WANTED)) if WANTED else chosen(range(FIRST, FIRST + DRAWN))
    with ThreadPoolExecutor(PLAYERS) as pool:
        said = [line for lines in pool.map(played, (seeds[nth::PLAYERS] for nth in range(PLAYERS))) for line in lines]
    if wrong := sorted(int(seed) for word, seed in said if word == "wrong"):
        tell(wrong[0])
    num_played = sum(int(count) for word, count in said if word == "played")
    assert num_played == len(seeds), "a player ended before its last history"
    print(f"{num_played} histories, without: {', '.join(kind.name for kind in OFF) or 'nothing'}")


def played(seeds: Sequence[int]) -> list[list[str]]:
    """What play.py says of them, word by word."""
    command, words = [sys.executable, "-P", str(PLAY)], " ".join(map(str, seeds))
    done = subprocess.run(command, input=words, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    return [line.split() for line in done.stdout.splitlines()]


def tell(seed: int) -> None:
    """Fail with the shortest story that goes wrong like this seed's."""
    scenario = shrunk(make(seed))
    story: list[str] = []
    reason = violation(scenario, story)
    again = f"MESHLM_SIM_SEED={seed} .venv/bin/pytest {os.path.relpath(__file__)}"
    pytest.fail("\n".join([reason, f"Again: {again}", repr(scenario), *story, reason]), pytrace=False)


def test_clients_with_a_key_get_their_answers_although_their_frontend_dies() -> None:
    """In the middle of a stream too: they go on where it broke."""
    answered = resumed = 0
    for seed in range(FIRST, FIRST + 150):
        with simulated():
            history = History(make(seed, (Kind.KILL_FRONTEND,)))
            history.play()
        answered += sum(client.num_retries > 0 and all(got.end for got in client.got) for client in history.clients)
        resumed += sum(had > 0 for had in history.broken)
    assert answered > 10
    assert resumed > 2


def test_what_a_dead_worker_ran_moves_to_another_rank() -> None:
    """With their tokens; and no client sees more of it than in any other history."""
    moved = begun = 0
    for seed in range(FIRST, FIRST + 150):
        story: list[str] = []
        scenario = replace(make(seed, (Kind.KILL_WORKER,)), num_ranks=2)
        assert violation(scenario, story) == ""
        moved += sum(" Readmit(" in line for line in story)
        begun += sum("num_crashes=(" in line and "num_crashes=()" not in line for line in story)
    assert moved > 20
    assert begun > 10


def test_groups_of_workers_lose_members_and_meet_again() -> None:
    """What each death breaks: a scheduler's in the middle of a step, and a worker's, without which the others wait."""
    left = differed = steps = 0
    for seed in range(FIRST, FIRST + 130):
        story: list[str] = []
        assert violation(make(seed, (Kind.KILL_WORKER, Kind.KILL_SENDING), Shape.GROUP), story) == ""
        left += sum(" ends " in line for line in story)
        differed += any("sent different plans" in line for line in story)
        steps += sum(" begins " in line for line in story)
    assert left > 30
    assert differed > 5
    assert steps > 3000


def test_operations_are_done_or_refused_whatever_dies() -> None:
    """The prefix cache is reset while requests run: no text changes, and nobody waits for an answer in the end."""
    done = failed = again = 0
    for seed in range(FIRST, FIRST + 150):
        story: list[str] = []
        shape = (Shape.PLAIN, Shape.GROUP, Shape.LOCKSTEP)[seed % 3]
        assert violation(make(seed, (*(Kind.RESET,) * 4, *KILLS_OF_RANKS), shape), story) == "", seed
        told = [line for line in story if " OperationDone(" in line and line.split()[2] == "supervisor/0"]
        failed += sum("error=''" not in line for line in told)
        done += len(told)
        asked = [(line.split()[2], line.partition(" Operation(")[2]) for line in story if " Operation(" in line]
        again += len(asked) > len(set(asked))
    assert done > 30, done
    assert failed < done / 10, "a rank that died is waited for"
    assert again, "a worker was asked twice, since its session ended before all had answered"


def test_a_mesh_that_is_paused_goes_on_whatever_dies() -> None:
    """Ranks that step together rest first; those that begin meanwhile are told."""
    paused = rested = 0
    for seed in range(FIRST, FIRST + 120):
        story: list[str] = []
        shape = (Shape.PLAIN, Shape.GROUP, Shape.LOCKSTEP, Shape.LOCKSTEP)[seed % 4]
        assert violation(make(seed, (*(Kind.HOLD,) * 4, *KILLS_OF_RANKS), shape), story) == "", seed
        paused += sum(" Operation(" in line and "Pause(" in line for line in story)
        rested += sum(" JointOrder(" in line and "STOP" in line for line in story)
    assert min(paused, rested) > 50, (paused, rested)


def test_a_mesh_whose_weights_change_has_one_version_whatever_dies() -> None:
    """No token mixes what two versions computed, none is of older weights than the one before, and in the end all have the same."""
    done = failed = behind = 0
    for seed in range(FIRST, FIRST + 200):
        story: list[str] = []
        shape = (Shape.PLAIN, Shape.GROUP, Shape.LOCKSTEP, Shape.HOSTS, Shape.FAR_HOSTS)[seed % 5]
        assert violation(make(seed, (*(Kind.UPDATE,) * 4, *KILLS_OF_RANKS, Kind.SCALE), shape), story) == "", seed
        told = [line for line in story if " OperationDone(" in line and line.split()[2] == "supervisor/0"]
        failed += sum("error=''" not in line for line in told)
        done += len(told)
        behind += sum(" Operation(" in line and "id='weights-" in line for line in story)
    assert done > 40, done
    assert failed < done / 4, (failed, done)
    assert behind, "a rank that came with other weights was asked to take the mesh's"


def test_ranks_that_step_together_lose_members() -> None:
    """Whatever dies, the others leave the step, meet again and go on; a rank without work steps along."""
    aborted = prepared = steps = empty = 0
    for seed in range(FIRST, FIRST + 100):
        story: list[str] = []
        assert violation(make(seed, (*KILLS_OF_RANKS, Kind.PAUSE), Shape.LOCKSTEP), story) == "", seed
        steps += sum(" waits " in line for line in story)
        empty += sum(" StepPlan(" in line and ": rows )" in line for line in story)
        prepared += sum(" JointOrder(" in line and "PREPARE" in line for line in story)
        aborted += sum(" aborts " in line for line in story)
    assert min(steps, empty) > 1000, (steps, empty)
    assert prepared > 200, prepared
    assert aborted > 15, aborted


def test_experts_move_between_ranks_whatever_dies() -> None:
    """An operation asks for it while requests run. Ranks of a step have their experts in the same places, also where one died
    while they moved: then all go back to the first ones."""
    moved = broken = done = failed = 0
    for seed in range(FIRST, FIRST + 90):
        story: list[str] = []
        assert violation(make(seed, (*(Kind.REBALANCE,) * 8, *KILLS_OF_RANKS), Shape.LOCKSTEP), story) == "", seed
        moved += sum(" moves " in line for line in story)
        broken += sum(" puts " in line for line in story)
        told = [line for line in story if " OperationDone(" in line and line.split()[2] == "supervisor/0"]
        failed += sum("error=''" not in line for line in told)
        done += len(told)
    assert min(moved, done) > 20, (moved, done)
    assert failed > 4, failed  # few: an operation waits for a rank that died
    assert broken > 1, broken


def test_links_between_hosts_are_lost_although_both_ends_live() -> None:
    silent = replaced = late = 0
    for seed in range(FIRST, FIRST + 150):
        story: list[str] = []
        shape = (Shape.HOSTS, Shape.FAR_HOSTS, Shape.SPANNING)[seed % 3]
        assert violation(make(seed, (Kind.CUT, Kind.CUT_ONE_WAY), shape), story) == ""
        gone = sum("silent for" in line for line in story)
        silent += gone > 0
        late += gone == 0 and any(" cuts " in line for line in story)
        replaced += any("replaced by a new process" in line for line in story)
    assert min(silent, replaced, late) > 5, (silent, replaced, late)


def test_links_between_frontends_and_detokenizers_are_lost_although_both_ends_live() -> None:
    """A frontend asks again, and counts attempts that the schedulers' deaths have brought further."""
    lost = begun = 0
    for seed in range(FIRST, FIRST + 400):
        story: list[str] = []
        assert violation(make(seed, (Kind.LOSE_LINK, Kind.LOSE_LINK, *OTHER_DEATHS), Shape.PLAIN), story) == "", seed
        lost += sum(" loses " in line for line in story)
        begun += sum(" Submit(" in line and "attempt 1)" in line for line in story)
    assert lost > 50
    assert begun > 30, begun


def test_nodes_tell_each_other_of_deaths() -> None:
    """Nobody waits until a process of another node that died is silent for too long; deaths from before a node joined are told then."""
    told = silent = 0
    for seed in range(FIRST, FIRST + 120):
        story: list[str] = []
        assert violation(make(seed, (Kind.KILL_COORDINATOR,), Shape.FAR_HOSTS), story) == ""
        lines = [line for line in story if "sees    coordinator/0  down" in line and " worker/" in line]
        told += sum(line.endswith("the process died") for line in lines)
        silent += sum("silent for" in line for line in lines)
    assert told > 20
    assert silent == 0


def test_a_seed_replays_the_same_story() -> None:
    told: list[str] = []
    for seed in range(FIRST, FIRST + 20):
        first: list[str] = []
        second: list[str] = []
        assert violation(make(seed), first) == violation(make(seed), second)
        assert first == second
        told += first
    assert any(" kills " in line for line in told)


def test_rows_get_none_one_or_several_tokens_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a share of all histories; here in each, under the deaths of workers and schedulers."""
    seen: Counter[int] = Counter()
    run = Model.run

    def counted(model: Model, plan: StepPlan, is_last: bool = True) -> tuple[list[int], list[int], Computed]:
        found = run(model, plan, is_last)
        seen.update(found[1])
        return found

    monkeypatch.setattr(Model, "run", counted)
    for seed in range(FIRST, FIRST + 80):
        scenario = replace(make(seed, (Kind.KILL_WORKER, Kind.KILL_SCHEDULER), Shape.PLAIN), max_drafts=3)
        assert violation(scenario) == "", seed
    assert all(seen[count] > 10 for count in range(5)), seen
    assert 0.4 < sum(make(seed).max_drafts > 0 for seed in range(1000)) / 1000 < 0.8


def test_windows_are_freed_and_found_again_although_processes_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of groups, in a share of all histories; here in each. Rows get blocks that another group had."""
    owners: dict[int, set[int]] = {}
    write = Model.write

    def noted(model: Model, row: int, position: int, state: int) -> None:
        for group in range(len(model.specs)):
            owners.setdefault(model.slot(row, position, group) // model.block_size, set()).add(group)
        write(model, row, position, state)

    monkeypatch.setattr(Model, "write", noted)
    for seed in range(FIRST, FIRST + 80):
        shape = (Shape.PLAIN, Shape.GROUP)[seed % 2]
        scenario = make(seed, (Kind.KILL_WORKER, Kind.KILL_SCHEDULER), shape)
        local = SlidingWindow(4) if seed % 8 < 4 else ChunkedAttention(6)
        specs: tuple[KVSpec, ...] = (FullAttention(), local)
        if seed % 4 > 1:  # hybrids: states are found at checkpoints, or computed anew
            specs = STATES[seed % len(STATES)]
        assert violation(replace(scenario, kv_specs=specs)) == "", seed
    assert any(len(groups) > 1 for groups in owners.values())
    assert 0.35 < sum(len(make(seed).kv_specs) > 1 for seed in range(1000)) / 1000 < 0.6


def test_states_never_have_seen_a_refused_draft_although_processes_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and states, in a share of all histories; here in each. Rows get fewer tokens than were drafted."""
    refused: Counter[int] = Counter()
    sample = Model._sample

    def noted(model: Model, row: int, count: int, drafts: int) -> None:
        refused[drafts - max(0, count - 1)] += 1
        sample(model, row, count, drafts)

    monkeypatch.setattr(Model, "_sample", noted)
    for seed in range(FIRST, FIRST + 90):
        scenario = make(seed, (Kind.KILL_WORKER, Kind.KILL_SCHEDULER), (Shape.PLAIN, Shape.HOSTS)[seed % 2])
        specs = STATES[seed % len(STATES)]
        assert violation(replace(scenario, kv_specs=specs, max_drafts=1 + seed % 4)) == "", seed
    assert all(refused[count] > 10 for count in range(4)), refused


def test_vectors_come_once_although_processes_die() -> None:
    """In a share of all histories; here nobody asks for anything else."""
    answered = again = 0
    for seed in range(FIRST, FIRST + 100):
        scenario = make(seed, (Kind.KILL_WORKER, Kind.KILL_FRONTEND, *OTHER_DEATHS))
        kinds = tuple(PoolKind)
        asks = tuple(replace(ask, pool=kinds[ask.number % len(kinds)], stop_ids=(), stops=()) for ask in scenario.asks)
        with simulated():
            history = History(replace(scenario, asks=asks))
            history.play()
        answered += sum(got.end is not None for client in history.clients for got in client.got)
        again += len(history.broken)
    assert answered > 100, answered
    assert again > 5, again
    assert 100 < sum(ask.pool is not None for seed in range(300) for ask in make(seed).asks) < 300


def test_prompts_are_handed_off_and_pages_moved_whatever_dies() -> None:
    """In a share of all histories; here in each: either rank dies, its scheduler or its worker, or the coordinator between them."""
    handed_off = copies = loaded = 0
    for seed in range(FIRST, FIRST + 150):
        story: list[str] = []
        shape = (Shape.PLAIN, Shape.GROUP)[seed % 2]
        scenario = replace(make(seed, KILLS_OF_RANKS, shape), num_ranks=2, num_prefill_ranks=0, prefix_caching=True)
        assert violation(with_roles(scenario), story) == "", seed
        handed_off += sum(" Readmit(" in line and "handed_off=True" in line for line in story)
        copies += sum(" moves " in line and "pages" in line for line in story)
        loaded += sum(" PagesMoved(" in line and "failed=b''" in line for line in story)
    assert handed_off > 50, handed_off
    assert copies > 50, copies
    assert loaded > 30, loaded
    assert 0.05 < sum(make(seed).num_prefill_ranks > 0 for seed in range(1000)) / 1000 < 0.3
