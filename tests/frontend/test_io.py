"""The frontend's links: what happens to requests whose detokenizer dies or takes no more."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from answering import asking as answers_asking
from msgspec import Struct
from parsing import RESOLVED

from meshlm.frontend.dashboard.feed import Feed
from meshlm.frontend.dashboard.snapshot import Facts
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.io import FrontendApp
from meshlm.frontend.observe import observer as request_log
from meshlm.frontend.openai.responses import AnswerHead, WholeResponse
from meshlm.frontend.requests.admission import PoisonBodies
from meshlm.frontend.routes.application import Application
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.control import MeshStats, Shutdown
from meshlm.protocol.edges.text import Abort, Cancel, Detokenize, DetokenizeReply, Finished, Submit, TextPrompt
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.client import mesh_client, placement
from meshlm.runtime.client.mesh_client import FULL
from meshlm.runtime.client.placement import Choice
from meshlm.runtime.errors import LinkDown, LinkFull, MessageTooLong
from meshlm.runtime.process.deaths import MAX_DEATHS
from meshlm.runtime.process.in_hand import question_name

ONE, OTHER = Identity(Role.DETOKENIZER, 0), Identity(Role.DETOKENIZER, 1)
LIFE = Incarnation(1)
LIMIT_S = 10


class StubMesh:
    """Keeps what is sent; some peers take no more, others are gone."""

    def __init__(self) -> None:
        self.log = SimpleNamespace(warning=lambda *_, **__: None, debug=lambda *_, **__: None)
        self.sent: asyncio.Queue[tuple[Identity, Struct]] = asyncio.Queue()
        self.full: set[Identity] = set()
        self.down: set[Identity] = set()
        self.too_long = False
        self.in_hand: tuple[str, ...] = ()
        self.identity = Identity(Role.FRONTEND)
        self.failure = self.blocked = ""

    def in_hand_of(self, peer: Identity, incarnation: Incarnation) -> tuple[str, ...]:
        return self.in_hand

    def send(self, peer: Identity, message: Struct) -> None:
        if peer in self.full:
            raise LinkFull(peer)
        if peer in self.down:
            raise LinkDown(peer)
        if self.too_long:
            raise MessageTooLong(peer, type(message).__name__, 101, 100)
        self.sent.put_nowait((peer, message))

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    def fatal(self, message: str) -> None:
        self.failure = message

    async def next(self) -> tuple[Identity, Struct]:
        return await asyncio.wait_for(self.sent.get(), LIMIT_S)


class ResponseSink:
    """Of one choice: how it failed."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []
        self.has_begun = False
        self.failures: list[tuple[ErrorKind, str]] = []

    def failed(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None:
        self.failures.append((kind, message))


def started(*detokenizers: Identity) -> tuple[FrontendApp, StubMesh]:
    app, mesh = FrontendApp(), StubMesh()
    stub: Any = mesh
    app.client.mesh = stub
    app.client.questions.asker = mesh.identity
    for identity in detokenizers:
        app.on_peer_up(identity, LIFE)
    return app, mesh


def asking(app: FrontendApp) -> tuple[list[Choice], Submit, ResponseSink]:
    handle = app.requests.new_handle()
    submit = Submit((handle,), (RequestId("r"),), TextPrompt("a"), SamplingParams())
    sink = ResponseSink()
    stub: Any = sink
    sink.choices = [Choice(stub, 0, 0, submit, handle)]
    return sink.choices, submit, sink


async def test_a_question_goes_on_at_another_detokenizer() -> None:
    app, mesh = started(ONE, OTHER)
    question = Detokenize(Handle(7), b"")
    asked = asyncio.ensure_future(app.requests.ask(question))
    assert await mesh.next() == (ONE, question)
    app.on_peer_down(ONE, LIFE, "the process died")
    assert await mesh.next() == (OTHER, question)
    app.on_message(OTHER, reply := DetokenizeReply(Handle(7), "text"))
    assert await asyncio.wait_for(asked, LIMIT_S) == reply
    app.on_message(OTHER, reply)  # once more: for nobody


async def test_a_question_waits_for_the_only_detokenizers_next_life() -> None:
    app, mesh = started(ONE)
    question = Detokenize(Handle(7), b"")
    asked = asyncio.ensure_future(app.requests.ask(question))
    assert await mesh.next() == (ONE, question)
    app.on_peer_down(ONE, LIFE, "the process died")
    await asyncio.sleep(0)
    app.on_peer_up(ONE, Incarnation(2))
    assert await mesh.next() == (ONE, question)
    app.on_message(ONE, reply := DetokenizeReply(Handle(7), "text"))
    assert await asyncio.wait_for(asked, LIMIT_S) == reply


async def test_a_question_that_kills_detokenizers_is_given_up() -> None:
    app, mesh = started(ONE)
    asked = asyncio.ensure_future(app.requests.ask(Detokenize(Handle(7), b"")))
    for life in range(1, MAX_DEATHS + 1):
        await mesh.next()
        app.on_peer_down(ONE, Incarnation(life), "the process died")
        app.on_peer_up(ONE, Incarnation(life + 1))
    with pytest.raises(HttpError, match="its detokenizer died 5 times within 60 s") as told:
        await asyncio.wait_for(asked, LIMIT_S)
    assert told.value.status == 500
    assert mesh.sent.empty()


async def test_a_question_that_detokenizers_had_in_hand_is_refused_at_the_second_death() -> None:
    app, mesh = started(ONE)
    asked = asyncio.ensure_future(app.requests.ask(Detokenize(Handle(7), b"")))
    other = asyncio.ensure_future(app.requests.ask(Detokenize(Handle(8), b"")))
    mesh.in_hand = (question_name(mesh.identity, 7),)
    for life in (1, 2):
        await mesh.next()
        await mesh.next()
        app.on_peer_down(ONE, Incarnation(life), "the process died")
        app.on_peer_up(ONE, Incarnation(life + 1))
    with pytest.raises(HttpError, match="processes died 2 times while they worked on this request") as told:
        await asyncio.wait_for(asked, LIMIT_S)
    assert (told.value.status, told.value.kind) == (400, "poison_request_error")
    await mesh.next()
    app.on_message(ONE, DetokenizeReply(Handle(8), "x"))
    assert (await asyncio.wait_for(other, LIMIT_S)).error == ""


async def test_what_is_open_when_its_time_is_over_is_told_why() -> None:
    app, mesh = started(ONE)
    choices, submit, sink = asking(app)
    app.requests.open(choices, submit)
    asked = asyncio.ensure_future(app.requests.ask(Detokenize(Handle(7), b"")))
    await mesh.next()
    await mesh.next()
    await app.stop()
    assert await mesh.next() == (ONE, Abort((RequestId("r"),)))
    assert sink.failures == [(ErrorKind.OVERLOADED, "this server is stopping")]
    with pytest.raises(HttpError, match="this server is stopping") as told:
        await asyncio.wait_for(asked, LIMIT_S)
    assert told.value.status == 503


@pytest.mark.parametrize("handover", [False, True])
async def test_dashboards_end_with_their_frontend(handover: bool) -> None:
    """They would keep it from ending until --drain-timeout."""
    app, _ = started(ONE)
    app.observer.feed = Feed(app, Facts("frontend/0", "1", "m"), 1)
    watcher = app.observer.feed.join()
    app.on_message(Identity(Role.SUPERVISOR), Shutdown(0.0, handover))
    await app.drain(LIMIT_S)
    assert await asyncio.wait_for(watcher.next(), LIMIT_S) is None


async def test_after_a_hand_over_what_is_open_breaks_off() -> None:
    """With an Idempotency-Key it goes on at another frontend, which an error would not lead to."""
    app, mesh = started(ONE)
    choices, submit, sink = asking(app)
    app.requests.open(choices, submit)
    await mesh.next()
    app.on_message(Identity(Role.SUPERVISOR), Shutdown(1.0, handover=True))
    await app.stop()
    assert not sink.failures
    assert mesh.sent.empty()


async def test_questions_go_where_the_fewest_requests_are() -> None:
    app, mesh = started(ONE, OTHER)
    choices, submit, _ = asking(app)
    app.requests.open(choices, submit)
    assert await mesh.next() == (ONE, submit)
    asked = asyncio.ensure_future(app.requests.ask(Detokenize(Handle(7), b"")))
    assert (await mesh.next())[0] == OTHER
    asked.cancel()


@pytest.mark.parametrize("why", ["none", "full", "down"])
async def test_a_question_that_nobody_takes(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_client, "HOLD_S", 0.01)
    app, mesh = started(*(() if why == "none" else (ONE,)))
    mesh.full, mesh.down = {ONE} if why == "full" else set(), {ONE} if why == "down" else set()
    with pytest.raises(HttpError) as told:
        await asyncio.wait_for(app.requests.ask(Detokenize(Handle(7), b"")), LIMIT_S)
    assert told.value.status == 503


async def test_a_full_queue_ends_a_request_and_no_other() -> None:
    """Also where it is not the request's own call that meets it, but another detokenizer's death."""
    app, mesh = started(ONE)
    choices, submit, sink = asking(app)
    app.requests.open(choices, submit)
    assert await mesh.next() == (ONE, submit)
    app.on_peer_up(OTHER, LIFE)
    mesh.full.add(OTHER)
    app.on_peer_down(ONE, LIFE, "the process died")
    assert sink.failures == [(ErrorKind.OVERLOADED, FULL)]
    app.requests.close(choices)
    more, submit, sink = asking(app)
    app.requests.open(more, submit)
    assert sink.failures == [(ErrorKind.OVERLOADED, FULL)]
    app.requests.close(more)
    app.client.tracker.check()
    assert app.num_open == 0
    assert mesh.sent.empty()


async def test_an_abort_that_finds_a_full_queue_is_left_out() -> None:
    """The detokenizer does not read: it will be replaced, and then nobody asks for the request again."""
    app, mesh = started(ONE)
    choices, submit, _ = asking(app)
    app.requests.open(choices, submit)
    mesh.full.add(ONE)
    app.requests.close(choices)
    mesh.full.clear()
    assert await mesh.next() == (ONE, submit)
    assert mesh.sent.empty()
    choices, submit, _ = asking(app)
    app.requests.open(choices, submit)
    app.requests.close(choices)
    await mesh.next()
    assert await mesh.next() == (ONE, Abort((RequestId("r"),)))


@pytest.mark.parametrize("error", [OSError("no sockets"), None])
async def test_a_server_that_ends_by_itself_ends_the_process(error: OSError | None) -> None:
    async def serve() -> None:
        if error is not None:
            raise error

    for asked in (True, False):
        app, mesh = started()
        app._is_stopping = asked
        serving = asyncio.ensure_future(serve())
        await asyncio.wait({serving})
        app._served(serving)
        assert bool(mesh.failure) == (not asked or error is not None)


async def test_a_question_whose_client_left_is_cancelled() -> None:
    app, mesh = started(ONE)
    asked = asyncio.ensure_future(app.requests.ask(Detokenize(Handle(7), b"1234")))
    await mesh.next()
    assert (app.requests.budget.num_questions, app.requests.budget.question_bytes) == (1, 4)
    asked.cancel()
    assert await mesh.next() == (ONE, Cancel(Handle(7)))
    assert (app.requests.budget.num_questions, app.requests.budget.question_bytes) == (0, 0)


async def test_an_answered_question_is_not_cancelled() -> None:
    app, mesh = started(ONE)
    asked = asyncio.ensure_future(app.requests.ask(Detokenize(Handle(7), b"")))
    await mesh.next()
    app.on_message(ONE, DetokenizeReply(Handle(7), "text"))
    await asyncio.wait_for(asked, LIMIT_S)
    assert mesh.sent.empty()
    assert app.requests.budget.num_questions == 0


@pytest.mark.parametrize(("attempt", "kind"), [(0, ErrorKind.INVALID), (1, ErrorKind.INTERNAL)])
async def test_a_request_that_no_frame_holds_is_refused(attempt: int, kind: ErrorKind) -> None:
    """By the client's fault at first; not when it goes on after a death."""
    app, mesh = started(ONE)
    mesh.too_long = True
    choices, submit, sink = asking(app)
    app.requests.open(choices, msgspec.structs.replace(submit, attempt=attempt))
    assert sink.failures == [
        (kind, "a message of 101 bytes is too long for the mesh (Submit to detokenizer/0; at most 100)")
    ]


async def test_a_question_that_no_frame_holds_is_refused() -> None:
    app, mesh = started(ONE)
    mesh.too_long = True
    with pytest.raises(HttpError, match="too long for the mesh") as told:
        await asyncio.wait_for(app.requests.ask(Detokenize(Handle(7), b"")), LIMIT_S)
    assert (told.value.status, told.value.param) == (400, "tokens")
    mesh.too_long = False
    again = asyncio.ensure_future(app.requests.ask(Detokenize(Handle(8), b"")))
    await mesh.next()
    app.on_message(ONE, reply := DetokenizeReply(Handle(8), "text"))
    assert await asyncio.wait_for(again, LIMIT_S) == reply


def test_statistics_that_come_before_the_start_are_kept() -> None:
    """Of a mesh that does not serve, above all: it does not while a frontend starts again."""
    app = FrontendApp()
    app.on_message(Identity(Role.COORDINATOR, 0), MeshStats(False))
    assert app.figures.now == MeshStats(False)


def test_readiness_knows_a_link_on_which_nothing_moves() -> None:
    app, mesh = started(ONE)
    app.readiness.resolved = RESOLVED
    app.figures.take(MeshStats(True))
    mesh.blocked = ""
    assert app.readiness.not_ready_reason() == ""
    mesh.blocked = "detokenizer/0 does not take what frontend/0 sends it"
    assert app.readiness.not_ready_reason() == mesh.blocked
    mesh.blocked = ""
    app.figures.now = MeshStats(True, blocked="worker/0 does not take what scheduler/0 sends it")
    assert "worker/0" in app.readiness.blocked()
    assert app.readiness.not_ready_reason() == "", "requests are served as far as they can be"


async def test_ready_tells_a_link_of_any_process() -> None:
    backend: Any = SimpleNamespace(
        config=MeshConfig(resolved=RESOLVED),
        resolved=RESOLVED,
        version="1",
        readiness=SimpleNamespace(
            not_ready_reason=lambda: "", blocked=lambda: "worker/0 hears nothing", refusal=lambda: ""
        ),
        observer=SimpleNamespace(refused=id, rates=None, ignored=id),
        poison=PoisonBodies(),
        endpoints=(),
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(Application(backend).app()), base_url="http://localhost"
    ) as http:
        answer = await http.get("/ready")
    assert (answer.status_code, answer.text) == (503, "worker/0 hears nothing")


def test_names_of_unknown_fields_are_neither_kept_whole_nor_without_number() -> None:
    app, mesh = started(ONE)
    said: list[str] = []
    mesh.log.warning = lambda _, field, path: said.append(field)
    app.observer.ignored(("one", "two\x1b[2J"), "/v1/completions")
    app.observer.ignored(("one",), "/v1/completions")
    assert said == ["one", "two\\x1b[2J"]
    for number in range(3000):
        app.observer.ignored((f"{number}" + "x" * 100_000,), "/v1/completions")
    assert len(said) == len(app.observer._log._unknown_seen) == request_log.MAX_UNKNOWN_SEEN
    assert max(map(len, said)) < 100


def test_the_line_of_a_request_with_thousands_of_sequences_is_short() -> None:
    lines: list[dict[str, object]] = []
    log = SimpleNamespace(info=lambda _, **fields: lines.append(fields))
    for ends in ([FinishReason.STOP] * 4000 + [None] * 96, [FinishReason.LENGTH, FinishReason.STOP]):
        answer: Any = WholeResponse(AnswerHead(answers_asking(False), "id", 0, "m", lambda: None))
        answer.choices = [SimpleNamespace(finished=end and Finished(0, end), token_ids=[1], weights=[]) for end in ends]
        request_log.RequestLog().ended(log, answer, 1.0, "/v1/completions", 200, 100.0)
    assert [line["finish_reason"] for line in lines] == [{"stop": 4000, "abort": 96}, ["length", "stop"]]
    assert max(len(repr(line)) for line in lines) < 500


async def test_choices_of_a_detokenizer_that_died_are_placed_in_turns_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "PLACED_AT_ONCE", 2)
    app, mesh = started(ONE)
    for _ in range(5):
        choices, submit, _ = asking(app)
        app.requests.open(choices, submit)
        await mesh.next()
    app.on_peer_up(OTHER, LIFE)
    app.on_peer_down(ONE, LIFE, "killed")
    assert mesh.sent.qsize() == 2
    assert [(await mesh.next())[0] for _ in range(5)] == [OTHER] * 5
    assert not app.client.tracker.placement.places_more
