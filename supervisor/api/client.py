"""The Python API's requests: the mesh's client (runtime/client/) with the outputs that callers get.

Owned by background.py, in whose loop it lives. What finds no room in the mesh waits, since nobody is in a hurry.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol.edges import text as edge
from meshlm.protocol.edges.control import MeshStats
from meshlm.protocol.edges.media import MediaRead
from meshlm.protocol.edges.text import Accepted, MediaPrompt, PairPrompt, Prompt, Submit
from meshlm.protocol.logprobs import positions_of
from meshlm.protocol.media import Media
from meshlm.protocol.wire.columns import pack_i32, unpack_i32
from meshlm.protocol.wire.ids import COORDINATOR, ErrorKind, FinishReason, Identity, Incarnation, RequestId, Role
from meshlm.runtime.client.draft_metrics import metrics_of
from meshlm.runtime.client.media_client import Held
from meshlm.runtime.client.mesh_client import MeshClient
from meshlm.runtime.client.placement import Choice, RowDetails, choices_of
from meshlm.runtime.client.questions import Reply
from meshlm.runtime.errors import RequestError
from meshlm.runtime.process.figures import Figures
from meshlm.supervisor.api.media import MediaInputs, MediaReader
from meshlm.supervisor.api.metrics import Counts, Metric
from meshlm.supervisor.api.outputs import CompletionOutput, RequestOutput, logprobs_of
from meshlm.supervisor.errors import raised_as

SENDS_A_TURN = 32  # between two looks at what came back
News = Callable[[list[CompletionOutput]], None]


class Sent(NamedTuple):
    """What is asked, and what its tokens go to. media: whose items come to its prompt first."""

    submit: Submit
    request: RequestOutput
    media: MediaInputs = ()


def name_of(request_id: str, index: int) -> RequestId:
    """The request id of one choice in the mesh."""
    return RequestId(f"{request_id}-{index}")


class Run:
    """The sequences that one caller waits for. `news` gets the outputs that have changed, after each message that changed some."""

    def __init__(self, bar: Any, news: News | None) -> None:
        self.bar, self.news = bar, news
        self.open: dict[Choice, Held | None] = {}  # with the media that they hold
        self.reading: set[asyncio.Task[None]] = set()  # prompts whose images, videos or sounds are not ready
        self.errors: list[str] = []
        self.all_done = asyncio.Event()
        self.changed: list[CompletionOutput] = []

    def ended(self, choice: Choice) -> None:
        if (held := self.open.pop(choice)) is not None:
            held.release()
        if self.bar is not None:
            self.bar.update(1)
        self.settle()

    def settle(self) -> None:
        if not self.open and not self.reading:
            self.all_done.set()

    def was_read(self, task: "asyncio.Task[None]") -> None:
        """A prompt's media are ready, and it is open; or it never will be."""
        self.reading.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(str(error))
        self.settle()

    def tell(self) -> None:
        changed, self.changed = self.changed, []
        if changed and self.news is not None:
            self.news(changed)


class OutputSink:
    """A ResponseSink that fills one prompt's outputs."""

    def __init__(self, request: RequestOutput, run: Run, counts: Counts) -> None:
        self.choices: list[Choice] = []
        self.has_begun = False
        self.run = run
        self._request, self._counts = request, counts

    def accepted(self, choice: Choice, accepted: Accepted) -> None:
        if accepted.prompt_token_ids:
            self._request.prompt_token_ids = unpack_i32(accepted.prompt_token_ids).tolist()
        if accepted.prompt_text:
            self._request.prompt = accepted.prompt_text

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        output = self._request.outputs[choice.index]
        output.token_ids += choice.token_ids[len(choice.token_ids) - num_tokens :].tolist()
        output.text += text
        if self.run.news is not None:
            self.run.changed.append(output)
        if details is not None:
            self._details(choice, output, details)

    def _details(self, choice: Choice, output: CompletionOutput, details: RowDetails) -> None:
        if details.logprobs is not None:
            output.logprobs = (output.logprobs or []) + [logprobs_of(position) for position in details.logprobs]
            new = sum(position.token.logprob for position in details.logprobs)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + new
        if details.prompt_logprobs is not None:
            self._request.prompt_logprobs = [None, *map(logprobs_of, positions_of(details.prompt_logprobs))]
        if details.first is not None and choice.first is None:  # taken up again, it finds its own tokens
            choice.first = details.first
            self._request.num_cached_tokens = details.first.num_cached_tokens
            waited_s = time.monotonic() - choice.opened_at
            self._counts.begun(details.first, waited_s, choice.num_prompt_tokens)
        if (end := details.finished) is not None:
            output.pooled = choice.pooled
            if self._counts.drafts_told is not None:
                output.spec_decode_metrics = metrics_of(end.drafts, self._counts.drafts_told)
            output.finish_reason, output.stop_reason = end.reason.value, end.stop_reason
            now, sizes = time.monotonic(), (choice.num_prompt_tokens, len(output.token_ids))
            times = (now - choice.opened_at, now - (choice.first_at or choice.opened_at))
            self._counts.ended(choice.engine, end.reason, sizes, times)
            if end.reason is FinishReason.ERROR:
                self.run.errors.append(end.message)
            self.run.ended(choice)

    def failed(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None:
        self.run.errors.append(message if message.startswith(param) else f"{param}: {message}")
        self.run.ended(choice)


class Client:
    """All requests of one `LLM`. `serving` is set while requests can be served."""

    def __init__(self) -> None:
        self.mesh_client = MeshClient(patient=True)
        self.serving = asyncio.Event()
        self.counts, self.figures = Counts(), Figures()
        self.media_reader = MediaReader()
        self._runs: set[Run] = set()
        self.new_handle = self.mesh_client.new_handle

    # --- App ---

    def on_message(self, peer: Identity, message: Struct) -> None:
        if isinstance(message, MeshStats):
            self.figures.take(message)
            self.counts.take(message)
            self._note_serving()
            return
        if isinstance(message, MediaRead):
            self.media_reader.client.answered(message)
            return
        self.mesh_client.on_message(peer, message, time.monotonic())
        if isinstance(message, edge.TextDeltas):
            self.mesh_client.tracker.take_counts()  # those of the outputs are kept instead
            for run in [run for run in self._runs if run.changed]:
                run.tell()

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        if peer.role is Role.DETOKENIZER:
            self.mesh_client.detokenizer_up(peer)
        elif peer.role is Role.MEDIA:
            self.media_reader.client.up()
        self._note_serving()

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        if peer.role is Role.DETOKENIZER:
            self.mesh_client.detokenizer_down(peer, incarnation)
        elif peer.role is Role.MEDIA:
            self.media_reader.client.down()
        self._note_serving()

    def flush(self) -> None:
        """Nothing is batched here."""

    def _note_serving(self) -> None:
        """Requests can be served once the coordinator says so and a detokenizer can be reached from here."""
        if self.figures.now.serving and self.mesh_client.tracker.load:
            self.serving.set()
        else:
            self.serving.clear()

    # --- requests ---

    async def run(self, submits: Iterable[Sent], bar: Any, news: News | None = None) -> list[RequestOutput]:
        """Send each as soon as it is made; return when all have ended. ValueError with the first refusal. `news`: see Run.

        When one cannot be made, or nobody waits any more, those before it end, and the error is raised."""
        run = Run(bar, news)
        self._runs.add(run)
        sent: list[RequestOutput] = []
        try:
            for number, (submit, request, media) in enumerate(submits, 1):
                if media:
                    self._open_later(submit, request, media, run)
                else:
                    self._open(submit, request, run)
                sent.append(request)
                if number % SENDS_A_TURN == 0:
                    await asyncio.sleep(0)
            if run.open or run.reading:
                run.all_done.clear()  # those that were sent may all have ended before the next ones were
                await run.all_done.wait()
        except BaseException:
            self._abort(run)
            raise
        finally:
            self._runs.discard(run)
        if run.errors:
            raise ValueError(run.errors[0])
        return sent

    def _open(self, submit: Submit, request: RequestOutput, run: Run, held: Held | None = None) -> None:
        choices = choices_of(OutputSink(request, run, self.counts), submit)
        if held is not None:
            held.num_users = len(choices)
        run.open.update(dict.fromkeys(choices, held))
        self.mesh_client.open(choices, submit)

    def _open_later(self, submit: Submit, request: RequestOutput, inputs: MediaInputs, run: Run) -> None:
        """Once its media are ready."""

        async def read() -> None:
            held = await self.media_reader.read(inputs, self._media_run)
            prompt = submit.prompt
            assert not isinstance(prompt, MediaPrompt | PairPrompt)
            self._open(replace(submit, prompt=MediaPrompt(prompt, (Media(held.items),))), request, run, held)

        task = asyncio.create_task(read())
        run.reading.add(task)
        task.add_done_callback(run.was_read)

    def _media_run(self) -> bool:
        """Whether prompts with media are being answered, whose ends make room."""
        return any(held for run in self._runs for held in run.open.values())

    def _abort(self, run: Run) -> None:
        for task in run.reading:
            task.cancel()
        self.mesh_client.close(list(run.open))
        for choice, held in run.open.items():
            self.counts.given_up(choice.engine)
            if held is not None:
                held.release()

    async def metrics(self, model: str) -> list[Metric]:
        """What was counted here, and the ranks' figures of this moment."""
        mesh = self.mesh_client.mesh
        assert mesh is not None
        stats = await self.figures.fresh(lambda question: mesh.send(COORDINATOR, question))
        return self.counts.snapshot(stats, model)

    # --- questions ---

    async def tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Ask a detokenizer for the ids of each prompt. ValueError when it refuses one."""
        replies = await asyncio.gather(*(self._ask(edge.Tokenize(self.new_handle(), prompt)) for prompt in prompts))
        return [unpack_i32(reply.token_ids).tolist() for reply in replies if isinstance(reply, edge.TokenizeReply)]

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. ValueError for one that the vocabulary does not have."""
        reply = await self._ask(edge.Detokenize(self.new_handle(), pack_i32(token_ids)))
        assert isinstance(reply, edge.DetokenizeReply)
        return reply.text

    async def _ask(self, question: edge.Tokenize | edge.Detokenize) -> Reply:
        with raised_as(ValueError, RequestError):
            reply = await self.mesh_client.ask(question)
        if reply.error:
            raise ValueError(reply.error)
        return reply
