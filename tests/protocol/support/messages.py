"""One instance of every message, and how golden.json holds them: shared by test_golden.py and whoever changes the protocol.

.venv/bin/python tests/protocol/support/messages.py --write
"""

import json
import sys
from enum import Enum
from pathlib import Path

import msgspec
from msgspec import Struct

from meshlm.protocol import admit_edge as admit
from meshlm.protocol import control_edge as control
from meshlm.protocol import (
    counts,
    dashboard,
    frames,
    grammar,
    kv,
    lockstep,
    operations,
    prompt_embeds,
    sampling,
    session,
    sleeping,
    tasks,
    timeline,
)
from meshlm.protocol import step_edge as step
from meshlm.protocol import text_edge as text
from meshlm.protocol import token_edge as token
from meshlm.protocol.columns import pack_f32, pack_i32
from meshlm.protocol.ids import (
    Epoch,
    ErrorKind,
    FinishReason,
    Handle,
    Identity,
    Incarnation,
    RequestId,
    Role,
    Row,
    StepId,
)

GOLDEN = Path(__file__).parents[1] / "golden.json"


EDGES = (admit, control, step, text, token)  # besides: operations

LIFE = Incarnation(1_750_000_000_000_000_000)
SCHEDULER, DETOKENIZER = Identity(Role.SCHEDULER, 3), Identity(Role.DETOKENIZER, 1)
GRAMMAR = grammar.Grammar(
    grammar.GrammarKind.JSON_SCHEMA,
    "{}",
    "response_format",
    False,
    False,
    " ?",
    False,
    "</think>",
    "<think>",
    grammar.ThinkingBudget(512, "</think>", "<think>", False),
)
EMBEDS = prompt_embeds.PromptEmbeds("bfloat16", ((3, 2), (9, 1)), b"\x01\x02" * 6)
SAMPLING = sampling.SamplingParams(
    max_tokens=99,
    min_tokens=2,
    temperature=0.75,
    top_p=0.5,
    top_k=40,
    min_p=0.125,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.5,
    seed=0x7FFF_FFFF_FFFF_FFFF,
    stop_token_ids=(5, 6),
    eos_token_ids=(2,),
    logit_bias={7: -100.0, 70000: 1.5},
    allowed_token_ids=(1, 2, 3),
    logprobs=0,
    prompt_logprobs=4,
    logprob_token_ids=(3, 4),
    bad_words_token_ids=((5,), (6, 7)),
    repetition_detection=sampling.RepetitionDetection(8, 2, 3),
    extra_args={"a": [1, "b"]},
    grammar=GRAMMAR,
)
WORK = admit.EngineRequest(
    request_id=RequestId("cmpl-é-0"),
    handle=Handle(0x7FFF_FFFF),
    prompt_token_ids=pack_i32([1, 2, 70000]),
    sampling=SAMPLING,
    attempt=2,
    output_token_ids=pack_i32([9]),
    priority=-7,
    cache_salt="salt",
    arrival_s=1750000000.25,
    deadline_s=1750000060.5,
    num_crashes=3,
    task=tasks.Pool(tasks.PoolKind.MEAN),
    embeds=EMBEDS,
)
MEMBER = control.Member(SCHEDULER, LIFE, "ipc:///run/meshlm/scheduler-3", True, "tcp://10.0.0.2:5700", "0a1b")
STANDBY = control.StandbyReport(Role.WORKER, 4712, "standby", 1750000000.5, 1 << 26)
PROCESS = control.ProcessReport(
    SCHEDULER, LIFE, 4711, "ready", 1750000000.5, 2, "stepping", 1 << 27, "gpu-7", {"worker/3": 5}
)
FRONTEND = Identity(Role.FRONTEND, 0)
REQUEST_VIEW = dashboard.RequestView(
    id="cmpl-é",
    path="/v1/completions",
    at_s=1750000000.25,
    seconds=0.5,
    hops={"encode": 0.25},
    status=200,
    rank="3",
    num_choices=2,
    num_prompt_tokens=9,
    num_cached_tokens=8,
    num_output_tokens=7,
    num_attempts=3,
    finish_reason="stop",
    error="no",
    frontend="frontend/1",
)
NEWS = control.News(1750000000.5, "error", "worker/3 died")
STARTED = admit.Started(RequestId("b"), 48)
RETURNED = admit.Returned(RequestId("c"), 1, Handle(11), DETOKENIZER, LIFE, 2)
LOST = admit.SchedulerIncarnation(SCHEDULER, LIFE)
SLEEPING = sleeping.Sleeping(("weights", "kv_cache"), 1)
COLUMNS = token.LogprobColumns(
    width=2,
    logprobs=pack_f32([-0.5]),
    ranks=pack_i32([3]),
    top_ids=pack_i32([8, -1]),
    top_logprobs=pack_f32([-0.25, -1.0]),
)
NEW_ROW = step.NewRow(Row(4), pack_i32([1, 2]), 2, pack_i32([10, 11]), SAMPLING, WORK.task, EMBEDS)
TOKEN_LOGPROB = text.TokenLogprob(220, -0.125, 1, " ", b" ")
POSITION = text.PositionLogprobs(TOKEN_LOGPROB, 1, (TOKEN_LOGPROB, text.TokenLogprob(9, -2.0, 2, "�", b"\xff")))
GRAPHS = control.GraphCounts({"decode": 9}, {"too_many_tokens": 2}, 5, {"few_tokens": 3}, (40, 20))
HISTOGRAM = counts.HistogramCounts(1.5, (1, 0, 2))
COUNTS = counts.ProcessCounts({"a": {"reason": 2.0}}, {"b": {"": 0.5}}, {"c": HISTOGRAM})
COUNTED = counts.Counted(COUNTS)
COUNTS_OF = counts.CountsOf(DETOKENIZER, COUNTS)
RANK_STATS = control.RankStats(1, 2, 3, 0.5, 4, 5, 6, 7, 8, GRAPHS, 9, 10, 11, COUNTS, SLEEPING)
OF_PROMPT = text.PromptLogprobs(
    COLUMNS, pack_i32([1, 220]), pack_i32([1]), pack_i32([1, 220]), ["!", " "], {9: b"\xff"}
)
SPAN = timeline.Span("plan", "loop", 1, 2, 1, {"step": 5})
EVENT = text.RequestEvent(5, "retry", "scheduler_lost")
FINISHED = text.Finished(1, FinishReason.ERROR, "###", 17, "the worker died", ErrorKind.TIMEOUT, "n", (EVENT,))
ENDED = token.Ended(1, FinishReason.STOP, 2, "eos", ErrorKind.OVERLOADED, "n", (5,))
EMBEDS_PROMPT = text.EmbedsPrompt(pack_i32([7, 8]), EMBEDS)
CHAT = text.ChatPrompt(
    b'[{"role":"user","content":"hi"}]', b"[{}]", "{{ x }}", b'{"a":1}', False, True, True, (EMBEDS_PROMPT,)
)

RETRY = text.Retry("ab12", b"digest", (3, 0), 0.5)

# Every field differs from its default: with omit_defaults a field at its default is not on the wire at all.
FULL: tuple[Struct, ...] = (
    # frontend <-> detokenizer
    text.TextPrompt("Grüße", False, "Ende"),
    text.TokenPrompt(pack_i32([1, -1])),
    CHAT,
    text.TextParams(("\n\n", "END"), True, False, ("<tool_call>",), False, 512, "right", ("darn",)),
    text.Submit(
        handles=(Handle(1), Handle(2)),
        request_ids=(RequestId("cmpl-a-0"), RequestId("cmpl-a-1")),
        prompt=CHAT,
        sampling=SAMPLING,
        text=text.TextParams(("x",), True, False, ("<tool_call>",), False, 1, "right", ("darn",)),
        max_tokens=7,
        cap_max_tokens=True,
        attempt=1,
        delivered=pack_i32([4, 5]),
        num_logprobs=1,
        want_ids=True,
        want_text=True,
        priority=3,
        cache_salt="s",
        arrival_s=1.5,
        deadline_s=2.5,
        dp_rank=1,
        retry=RETRY,
        task=WORK.task,
    ),
    text.Delivered(RequestId("cmpl-a-0"), (POSITION,)),
    RETRY,
    text.Detach((RequestId("cmpl-a-0"),), (Handle(5),)),
    text.Abort((RequestId("cmpl-a-0"),)),
    text.Attach(Handle(5), RequestId("cmpl-a-0"), 12),
    text.PairPrompt("Frage", "Grüße", True, 7, 9),
    EMBEDS_PROMPT,
    EMBEDS,
    text.JoinedPrompt((text.TextPrompt("Grüße", False), text.TokenPrompt(pack_i32([1, 2])))),
    text.Tokenize(Handle(6), text.TextPrompt("a", False), True, True, True),
    text.Detokenize(Handle(7), pack_i32([1]), text.TextParams(("x",))),
    text.Accepted((Handle(1),), 3, pack_i32([1, 2, 3]), "abc", "a", 1.5, (5,)),
    text.Rejected((Handle(1), Handle(2)), ErrorKind.INVALID, "too long", "prompt"),
    TOKEN_LOGPROB,
    POSITION,
    OF_PROMPT,
    EVENT,
    FINISHED,
    text.TextDeltas(
        handles=pack_i32([1, 2]),
        starts=pack_i32([0, 5]),
        counts=pack_i32([2, 1]),
        token_ids=pack_i32([7, 8, 9]),
        texts=["ab", ""],
        finished=[FINISHED],
        logprobs={0: [POSITION, POSITION]},
        prompt_logprobs={0: OF_PROMPT},
        first={0: token.First(16, 20, 30, 1, 40, 50)},
        timings_ns=(1, 2, 3),
        pooled={1: pack_f32([0.5])},
    ),
    text.TokenizeReply(
        Handle(6), pack_i32([1]), ("a",), pack_i32([0, 1]), 2048, "no", "prompt", ErrorKind.OVERLOADED, b"\x01"
    ),
    text.Cancel(Handle(7)),
    text.DetokenizeReply(Handle(7), "a", pack_i32([1]), "no", "tokens", ErrorKind.OVERLOADED),
    # detokenizer <-> coordinator -> scheduler
    WORK,
    LOST,
    admit.Admit(WORK, 2, (LOST,), True),
    admit.AbortRequests((RequestId("a"), RequestId("b"))),
    admit.Routed(Handle(9), SCHEDULER, LIFE),
    admit.Refused(Handle(9), ErrorKind.INVALID, "no such rank", "X-data-parallel-rank"),
    admit.RankLost(LOST),
    admit.Readmit((Handle(9), Handle(10)), (0, 2)),
    admit.Assign(WORK, DETOKENIZER, LIFE),
    admit.GiveBack((RequestId("a"),), True),
    admit.ReportLoad(7),
    STARTED,
    RETURNED,
    admit.Load(
        1,
        2,
        3,
        4,
        5,
        (RequestId("a"),),
        6,
        7,
        8,
        9,
        10,
        11,
        False,
        32,
        12,
        (STARTED,),
        (RETURNED,),
        GRAPHS,
        13,
        14,
        15,
        True,
        COUNTS,
        SLEEPING,
    ),
    # counts of processes
    HISTOGRAM,
    COUNTS,
    COUNTED,
    COUNTS_OF,
    # scheduler <-> detokenizer
    ENDED,
    COLUMNS,
    token.TokenDeltas(
        handles=pack_i32([1, 2]),
        starts=pack_i32([0, 4]),
        counts=pack_i32([1, 1]),
        token_ids=pack_i32([11, 2]),
        ended=[ENDED],
        logprobs={0: COLUMNS},
        prompt_logprobs={1: COLUMNS},
        first={1: token.First(32, 5, 6, 1, 40, 50)},
        timings_ns=(1,),
        pooled={1: pack_f32([0.5])},
    ),
    token.First(16, 20, 30, 1, 40, 50),
    token.AttachTokens(Handle(3), 21),
    token.Disown(pack_i32([3])),
    token.StillThere(pack_i32([4])),
    # scheduler <-> worker
    step.Reset(77, (1, 2), lockstep.StepGroup(Epoch(4), 2), SLEEPING),
    step.ResetGroup("worker/1 is lost"),
    step.WorkerAsleep(77, SLEEPING),
    SLEEPING,
    NEW_ROW,
    step.StepPlan(
        session=77,
        step=StepId(5),
        rows=pack_i32([0, 4]),
        starts=pack_i32([8, 0]),
        counts=pack_i32([1, 2]),
        samples=b"\x01\x00",
        num_tokens=3,
        removed_rows=pack_i32([2]),
        new_rows=[NEW_ROW],
        block_rows=pack_i32([0]),
        block_ids=pack_i32([12]),
        input_ids=pack_i32([17]),
        forgotten=pack_i32([3]),
        remembered=pack_i32([10]),
        hashes=b"h" * step.HASH_BYTES,
        planned_ns=1,
        num_drafts=pack_i32([2, 0]),
    ),
    step.WorkerReady(
        77,
        1000,
        16,
        64,
        1024,
        49152,
        pack_i32([10]),
        b"h" * step.HASH_BYTES,
        3,
        (kv.FullAttention(), kv.SlidingWindow(64)),
        (tasks.PoolKind.LAST,),
        256,
    ),
    step.LastPlan(77, 76, 5),
    step.StepResult(
        77,
        StepId(5),
        pack_i32([3]),
        {0: COLUMNS},
        {1: COLUMNS},
        1,
        2,
        3,
        4,
        5,
        pack_i32([1]),
        {2: pack_f32([0.5])},
        {0: "no token"},
    ),
    step.StepFailed(77, StepId(5), "out of memory"),
    step.PrepareGrammar(77, 3, "start: A"),
    step.GrammarReady(77, 3, "no such rule"),
    step.WorkerStats(GRAPHS),
    # everyone <-> supervisor, everyone <-> coordinator
    control.Progress("weights", 12, 100, "MB"),
    control.Ready({"KV cache": "9,000 blocks"}),
    control.Failed("no such model"),
    control.Heartbeat(4, "stepping", 1 << 33, {"coordinator/0": 5}),
    control.RankDrained(3),
    control.Died(SCHEDULER, LIFE),
    control.SetRanks(4),
    control.Shutdown(30.0, True),
    control.Refuse(True),
    control.ChangeSettings({"log_level": "info,worker=debug", "max_waiting": 7}),
    control.OpenRequests(3),
    control.NodeJoin("gpu-7", (1, 2), (4, 8), {"--dtype": "bfloat16"}),
    control.NodeWelcome(),
    control.NodeRefused("it differs"),
    PROCESS,
    STANDBY,
    control.NodeReport((PROCESS,), (STANDBY,)),
    control.AskProcesses(1750000000.5),
    control.AskRequests({"frontend/1": 1750000000.25}, FRONTEND),
    control.FrontendRequests("frontend/1", FRONTEND, 1750000000.25, 1750000000.5, 7, (REQUEST_VIEW,), (REQUEST_VIEW,)),
    NEWS,
    control.MeshProcesses((PROCESS,), (STANDBY,), (NEWS,), "rank 2"),
    control.RestartProcesses((SCHEDULER,)),
    control.RestartNews(("worker/1: replaced",), True, "no room"),
    MEMBER,
    control.Join(MEMBER),
    control.Leave(),
    control.Members(Epoch(8), (MEMBER, control.Member(DETOKENIZER, LIFE, "ipc://d"))),
    GRAPHS,
    RANK_STATS,
    control.QueueFull(True),
    control.MeshStats(
        True,
        "no detokenizer",
        (RANK_STATS,),
        4,
        True,
        "worker/0 does not take what scheduler/0 sends it",
        True,
        (COUNTS_OF,),
    ),
    control.Blocked("worker/0 does not take what scheduler/0 sends it"),
    control.AskStats(),
    # timelines
    timeline.RecordTimeline(7, 2.5),
    SPAN,
    timeline.TimelinePart(7, DETOKENIZER, 42, 9, (SPAN,), 3, "node-b"),
    # groups that step together
    lockstep.JointOrder(Epoch(5), lockstep.Phase.STOP, ((0, LIFE),), 7, Epoch(4)),
    lockstep.JointReport(Epoch(5), lockstep.Phase.STEP, 7, 6, True, LIFE),
    lockstep.StepGroup(Epoch(4), 2),
    # operations
    operations.Profile(True),
    operations.ResetPrefixCache(True),
    operations.RebalanceExperts(),
    operations.Pause(True, True),
    operations.Resume(),
    operations.AbortRunning(("cmpl-a",)),
    operations.Sleep(2),
    operations.WakeUp(("weights",)),
    operations.CallWorkers("scale", b'{"args":[1],"kwargs":{}}', 5.0),
    operations.Stop(),
    operations.Operation(operations.OperationId("0a"), operations.Profile(True)),
    operations.OperationDone(operations.OperationId("0a"), "no room", ("/traces/worker-0.json",), 3, (b"null",)),
    # carried by several
    SAMPLING,
    tasks.GENERATE,
    tasks.Pool(tasks.PoolKind.LAST, tasks.PoolHead.CLASSIFY, True, 64, 3, 5, 0, 2),
    session.Hello("0123456789abcdef", "ipc:///run/meshlm/frontend-0", "tcp://10.0.0.2:5700", "0a1b", LIFE),
)
NAMES = [f"{type(value).__module__.rpartition('.')[2]}.{type(value).__name__}" for value in FULL]
BY_NAME = dict(zip(NAMES, FULL))
ENUMS: tuple[type[Enum], ...] = (
    Role,
    FinishReason,
    ErrorKind,
    frames.Kind,
    tasks.PoolKind,
    tasks.PoolHead,
    grammar.GrammarKind,
    lockstep.Phase,
)


def frame() -> bytes:
    """A whole frame: header and a message, as the socket carries it."""
    header = frames.Header(
        frames.Kind.DATA, SCHEDULER, DETOKENIZER, LIFE, Incarnation(LIFE + 1), 0x0102_0304_0506_0708, 9
    )
    return frames.pack(header, msgspec.msgpack.encode(token.AttachTokens(Handle(3), 21)))


def least(value: Struct) -> Struct:
    """The same message with nothing but its required fields."""
    fields = msgspec.structs.fields(type(value))
    return type(value)(**{field.name: getattr(value, field.name) for field in fields if field.required})


def defaults(value: Struct) -> str:
    """What the fields mean that are not there."""
    found = least(value)
    optional = [field.name for field in msgspec.structs.fields(type(value)) if not field.required]
    return ", ".join(f"{name}={getattr(found, name)!r}" for name in optional)


def encoded() -> dict[str, dict[str, str]]:
    """What golden.json holds: the message with all its fields and with the required ones only; values of enums."""
    messages = {
        name: {
            "full": msgspec.msgpack.encode(value).hex(),
            "least": msgspec.msgpack.encode(least(value)).hex(),
            "defaults": defaults(value),
        }
        for name, value in BY_NAME.items()
    }
    enums = {kind.__name__: {"values": " ".join(str(member.value) for member in kind)} for kind in ENUMS}
    return {**messages, **enums, "frame": {"full": frame().hex()}}


def golden() -> dict[str, dict[str, str]]:
    return msgspec.json.decode(GOLDEN.read_bytes(), type=dict[str, dict[str, str]])


def write() -> None:
    GOLDEN.write_text(json.dumps(encoded(), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    write()
    print(f"{GOLDEN}: {len(BY_NAME)} messages")
