"""A frontend without a mesh, whose model says what the test wants: for tests with the clients' own packages."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import httpx
from doubles import plays_all_parts
from msgspec import Struct
from parsing import RESOLVED

from meshlm.frontend.dashboard.feed import Feed
from meshlm.frontend.dashboard.snapshot import Facts
from meshlm.frontend.endpoints import PluginRoute
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.rate_limits import RateLimits
from meshlm.frontend.openai.responses import Response
from meshlm.frontend.operator.mesh_operations import AskedRanks
from meshlm.frontend.requests.adapters import Adapters
from meshlm.frontend.requests.admission import PoisonBodies
from meshlm.frontend.requests.budget import Budget
from meshlm.frontend.requests.resolving import Resolving
from meshlm.frontend.routes.application import Application
from meshlm.protocol.config import MeshConfig, Resolved, ServerConfig
from meshlm.protocol.config.changing import changed
from meshlm.protocol.edges.control import AskProcesses, MeshProcesses, MeshStats
from meshlm.protocol.edges.text import (
    Accepted,
    ChatPrompt,
    Detokenize,
    DetokenizeReply,
    Finished,
    PositionLogprobs,
    Submit,
    TextPrompt,
    Tokenize,
    TokenizeReply,
)
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle
from meshlm.runtime.client.media_client import MediaClient
from meshlm.runtime.client.placement import Choice, RowDetails
from meshlm.runtime.io_processors import IOProcessor
from meshlm.runtime.process.figures import Figures

NUM_PROMPT, NUM_CACHED = 12, 4
STOP = Finished(0, FinishReason.STOP)


class Scripted:
    """A Backend. Each request gets `pieces`, one token each, and the end `finished`; `failure` refuses it."""

    version = "1.2"
    requests: Any
    readiness: Any
    observer: Any
    operations: Any
    adapters: Adapters
    media: MediaClient
    resolving: Resolving

    def __init__(self, server: ServerConfig | None = None, resolved: Resolved = RESOLVED) -> None:
        self.num_open = 0
        self.resolved = resolved
        plays_all_parts(self)
        self.feed = Feed(self, Facts("frontend/0", self.version, resolved.served_names[0]), limit=2)
        self.config = MeshConfig(server=server or ServerConfig(responses_store="off"), resolved=resolved)
        self.media = MediaClient()
        self.rates = RateLimits("")
        self.poison = PoisonBodies()
        self.io_processor: IOProcessor | None = None
        self.endpoints: tuple[PluginRoute, ...] = ()
        self.draws = random.Random(1)
        self.pieces: Sequence[str] = ("Hello", " you")
        self.finished = STOP
        self.failure: tuple[ErrorKind, str, str] | None = None
        self.logprobs: Sequence[PositionLogprobs] = ()
        self.go = asyncio.Event()  # the first token waits for it
        self.go.set()
        self.stops_at = -1  # so many tokens come, and then nothing
        self.num_said = 0  # tokens of the newest choice
        self.submits: list[Submit] = []
        self.mesh = MeshProcesses(())  # what the supervisor says
        self.opened: list[list[Choice]] = []
        self.closed: list[Choice] = []
        self.answers: list[Response] = []
        self.ignored_fields: tuple[str, ...] = ()
        self.questions = list[Tokenize]()
        self.budget = Budget(1 << 30)
        self.refusals: list[str] = []  # by reason
        self._handle = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.figures = Figures()
        self.figures.take(MeshStats(True))
        self.routes = Application(self)
        self.app: Any = self.routes.app()

    @property
    def prompt(self) -> ChatPrompt:
        """The newest request's."""
        prompt = self.submits[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        return prompt

    # --- Backend ---

    def not_ready_reason(self) -> str:
        return ""

    def blocked(self) -> str:
        return ""

    def refusal(self, *, attaches: bool) -> str:
        return ""

    def refused(self, error: HttpError, seconds: float = 0.0) -> None:
        self.refusals.append(error.reason())

    async def wait_serving(self) -> str:
        return ""

    def new_handle(self) -> Handle:
        self._handle += 1
        return Handle(self._handle)

    def open(self, choices: list[Choice], submit: Submit) -> None:
        self.submits.append(submit)
        self.opened.append(choices)
        for choice in choices:
            task = asyncio.ensure_future(self._say(choice))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _say(self, choice: Choice) -> None:
        sink = choice.sink
        submit = choice.submit
        ids = pack_i32(range(NUM_PROMPT)) if submit.want_ids else b""
        text = "the prompt" if submit.want_text else ""
        sink.accepted(choice, Accepted((choice.handle,), NUM_PROMPT, ids, text, ""))
        await self.go.wait()
        first: First | None = First(NUM_CACHED)
        for place, piece in enumerate(self.pieces):
            await asyncio.sleep(0)
            self.num_said = place
            if choice in self.closed or place == self.stops_at:
                return
            logprobs = [self.logprobs[place]] if self.logprobs else None
            self._row(choice, [place], piece, RowDetails(None, logprobs, None, first))
            first = None
        self.num_said = len(self.pieces)
        if self.num_said == self.stops_at:
            return
        if self.failure is not None:
            choice.finished = Finished(0, FinishReason.ERROR)
            sink.failed(choice, *self.failure)
            return
        self._row(choice, [], "", RowDetails(self.finished, None, None, first))

    def _row(self, choice: Choice, token_ids: list[int], text: str, details: RowDetails) -> None:
        choice.token_ids.extend(token_ids)
        choice.finished = details.finished
        choice.sink.row(choice, len(token_ids), text, details)

    def close(self, choices: list[Choice]) -> None:
        self.closed += choices

    async def moved(self) -> None:
        await asyncio.sleep(0)

    async def ask(self, message: Tokenize | Detokenize) -> TokenizeReply | DetokenizeReply:
        """As many tokens as the messages' JSON has bytes."""
        assert isinstance(message, Tokenize)
        assert isinstance(message.prompt, ChatPrompt | TextPrompt)
        self.questions.append(message)
        size = len(message.prompt.messages_json) if isinstance(message.prompt, ChatPrompt) else len(message.prompt.text)
        return TokenizeReply(message.handle, pack_i32([1] * size), max_model_len=self.resolved.max_model_len)

    @property
    def ranks(self) -> AskedRanks:
        return AskedRanks(self.tell_supervisor)

    async def operate(self, action: Any) -> Any:
        raise HttpError(503, "there are no workers")

    def ignored(self, unknown_fields: tuple[str, ...], path: str) -> None:
        self.ignored_fields += unknown_fields

    def done(self, answer: Response, started: float, path: str, status: int) -> None:
        self.answers.append(answer)
        self.ignored(answer.parsed_request.unknown_fields, path)

    def change(self, values: dict[str, str | int | float]) -> None:
        self.config = changed(self.config, values)

    async def fresh_stats(self) -> MeshStats:
        return MeshStats(True)

    async def certain_stats(self) -> MeshStats:
        return MeshStats(True)

    def tell_supervisor(self, message: Struct) -> None:
        if isinstance(message, AskProcesses):
            self.feed.told(self.mesh)

    def open_choices(self) -> list[Choice]:
        return [choice for submit in self.opened for choice in submit if choice.finished is None]

    async def scrape(self, stats: MeshStats) -> bytes:
        return b""


async def post(server: Scripted, path: str, body: Any, status: int = 200) -> Any:
    """What it answers: the text of a stream, else the decoded JSON."""
    transport = httpx.ASGITransport(app=server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.text if answer.headers["content-type"].startswith("text/event-stream") else answer.json()
