"""What messages of `messages.py` carry: every field differs from its default."""

from meshlm.protocol import (
    adapters,
    audio,
    counts,
    dashboard,
    drafting,
    grammar,
    kv_transfer,
    media,
    pool,
    prompt_embeds,
    samplers,
    sampling,
    sleeping,
    timeline,
)
from meshlm.protocol.edges import admit, control, kv, step, text, token
from meshlm.protocol.edges import media as edge_media
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.columns import pack_f32, pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, Identity, Incarnation, RequestId, Role, Row

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
    "hermes",
    ("f",),
)
EMBEDS = prompt_embeds.PromptEmbeds("bfloat16", ((3, 2), (9, 1)), b"\x01\x02" * 6, pack_i32([5, 6, 7]), b"d" * 48)
BREAKERS = samplers.SequenceBreakers(("\n",), pack_i32([13, 14]))
DRAFTING = drafting.Drafting(2)
ADAPTER = adapters.Adapter("sql", "/adapters/sql", b"d" * 32)
KV_TRANSFER = kv_transfer.KVTransfer(b'{"do_remote_prefill":true}', True, True)
PAGES = kv.PageMemory("/proc/7/fd/9", 64, (kv.Segment(4096, 1024, 512),), b"h" * 64)
AUDIO = audio.Audio(pack_f32([0.5, -0.25]))
MEDIA = media.Media(
    (
        media.MediaItem(
            media.Modality.IMAGE,
            b"d" * media.DIGEST_BYTES,
            pack_i32([5, 6, 6, 7]),
            bytes([0, 1, 1, 0]),
            4,
            (1, 2, 1),
            "/dev/shm/meshlm/x",
            (media.MediaTensor("pixel_values", "float32", (3, 28, 14), 64),),
            True,
            5,
            "\n",
            "\n\n",
            (0,),
        ),
    )
)
MEDIA_SOURCE = edge_media.MediaSource(
    media.Modality.IMAGE,
    "messages[0].content[1]",
    "messages",
    b"\x89PNG",
    "https://a.example/b.png",
    "cat-1",
    b'{"a":1}',
)
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
    begin_suppress_token_ids=(9,),
    logprobs=0,
    prompt_logprobs=4,
    logprob_token_ids=(3, 4),
    bad_words_token_ids=((5,), (6, 7)),
    repetition_detection=sampling.RepetitionDetection(8, 2, 3),
    extra_args={"a": [1, "b"]},
    typical_p=0.5,
    top_n_sigma=1.5,
    xtc_probability=0.25,
    xtc_threshold=0.125,
    dry_multiplier=0.75,
    dry_base=2.5,
    dry_allowed_length=3,
    dry_penalty_last_n=64,
    dry_sequence_breakers=("\n",),
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
    extras=(pool.Pool(pool.PoolKind.MEAN), GRAMMAR, EMBEDS, AUDIO, MEDIA, BREAKERS, DRAFTING, KV_TRANSFER, ADAPTER),
    weights="step-3",
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
RETURNED = admit.Returned(RequestId("c"), 1, Handle(11), DETOKENIZER, LIFE, 2, True)
LOST = admit.SchedulerIncarnation(SCHEDULER, LIFE)
SLEEPING = sleeping.Sleeping(("weights", "kv_cache"), 1)
COLUMNS = token.LogprobColumns(
    width=2,
    logprobs=pack_f32([-0.5]),
    ranks=pack_i32([3]),
    top_ids=pack_i32([8, -1]),
    top_logprobs=pack_f32([-0.25, -1.0]),
)
NEW_ROW = step.NewRow(Row(4), pack_i32([1, 2]), 2, pack_i32([10, 11]), SAMPLING, WORK.extras, b"whose")
TOKEN_LOGPROB = text.TokenLogprob(220, -0.125, 1, " ", b" ")
POSITION = text.PositionLogprobs(TOKEN_LOGPROB, 1, (TOKEN_LOGPROB, text.TokenLogprob(9, -2.0, 2, "�", b"\xff")))
GRAPHS = control.GraphCounts({"decode": 9}, {"too_many_tokens": 2}, 5, {"few_tokens": 3}, (40, 20), {"mixed": 2})
HISTOGRAM = counts.HistogramCounts(1.5, (1, 0, 2))
COUNTS = counts.ProcessCounts({"a": {"reason": 2.0}}, {"b": {"": 0.5}}, {"c": HISTOGRAM})
COUNTED = counts.Counted(COUNTS)
COUNTS_OF = counts.CountsOf(DETOKENIZER, COUNTS)
WEIGHTS = WeightsVersion(3, "step-3", "/models/new", "ab12")
RANK_STATS = control.RankStats(
    1, 2, 3, 0.5, 4, 5, 6, 7, 8, GRAPHS, 9, 10, 11, COUNTS, SLEEPING, 12, 13.5, "prefill", WEIGHTS, "gone", 14
)
OF_PROMPT = text.PromptLogprobs(
    COLUMNS, pack_i32([1, 220]), pack_i32([1]), pack_i32([1, 220]), ["!", " "], {9: b"\xff"}
)
SPAN = timeline.Span("plan", "loop", 1, 2, 1, {"step": 5})
EVENT = text.RequestEvent(5, "retry", "scheduler_lost")
FINISHED = text.Finished(
    1, FinishReason.ERROR, "###", 17, "the worker died", ErrorKind.TIMEOUT, "n", (EVENT,), b"\x03\x01", b"{}"
)
ENDED = token.Ended(1, FinishReason.STOP, 2, "eos", ErrorKind.OVERLOADED, "n", (5,), b"{}")
CHAT = text.ChatPrompt(b'[{"role":"user","content":"hi"}]', b"[{}]", "{{ x }}", b'{"a":1}', False, True, True)
MEDIA_PROMPT = text.MediaPrompt(text.TokenPrompt(pack_i32([1, 2])), (EMBEDS, AUDIO))
RETRY = text.Retry("ab12", b"digest", (3, 0), 0.5)
