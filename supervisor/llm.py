"""The Python API: the same mesh without HTTP.

`LLM` starts the processes as `meshlm serve` does, less the frontends, and takes a frontend's place itself, in a background thread with
its own event loop. The children are programs of their own, so a script needs no `__main__` guard.
"""

import asyncio
import atexit
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop
from msgspec import Struct
from tqdm import tqdm

from meshlm.protocol.columns import pack_i32, unpack_i32
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.control_edge import MeshStats
from meshlm.protocol.ids import FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.protocol.sampling import SamplingParams as WireParams
from meshlm.protocol.text_edge import (
    Accepted,
    ChatPrompt,
    Finished,
    PositionLogprobs,
    Prompt,
    Rejected,
    Submit,
    TextDeltas,
    TextParams,
    TextPrompt,
    Tokenize,
    TokenizeReply,
    TokenPrompt,
)
from meshlm.runtime.mesh import Mesh
from meshlm.supervisor import flags, io, resolve, rundir
from meshlm.supervisor.display import StartDisplay
from meshlm.supervisor.errors import StartError

T = TypeVar("T")


@dataclass
class SamplingParams:
    """How to sample; names, meanings and defaults are vLLM's."""

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def wire(self, eos: tuple[int, ...]) -> WireParams:
        """As the mesh knows them. ValueError names a value that is not allowed."""
        self._check()
        return WireParams(
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=int.from_bytes(os.urandom(8), "little") >> 1 if self.seed is None else self.seed & (2**63 - 1),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            eos_token_ids=() if self.ignore_eos else eos,
            logit_bias=self.logit_bias or {},
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            logprobs=-1 if self.logprobs is None else self.logprobs,
            prompt_logprobs=-1 if self.prompt_logprobs is None else self.prompt_logprobs,
        )

    def _check(self) -> None:
        allowed = {
            "n": self.n >= 1,
            "max_tokens": self.max_tokens is None or self.max_tokens >= 1,
            "min_tokens": self.min_tokens >= 0,
            "temperature": self.temperature >= 0,
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= -1,
            "min_p": 0 <= self.min_p <= 1,
            "presence_penalty": -2 <= self.presence_penalty <= 2,
            "frequency_penalty": -2 <= self.frequency_penalty <= 2,
            "repetition_penalty": self.repetition_penalty > 0,
        }
        wrong = [name for name, fine in allowed.items() if not fine]
        if wrong:
            raise ValueError(f"SamplingParams.{wrong[0]}: {getattr(self, wrong[0])} is not allowed")

    def text(self) -> TextParams:
        stop = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        return TextParams(
            stop=tuple(stop),
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )


@dataclass
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One prompt's sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finished() for output in self.outputs)


class _Client:
    """The frontend's place in the mesh: submits, collects. Lives in the background loop."""

    def __init__(self) -> None:
        self.mesh: Mesh | None = None
        self.serving = asyncio.Event()
        self._mesh_serves = False
        self._rows: dict[int, tuple[RequestOutput, CompletionOutput]] = {}
        self._errors: list[str] = []
        self._asked: dict[int, asyncio.Future[TokenizeReply]] = {}
        self._next = 0
        self._bar: Any = None
        self._all_done: asyncio.Event = asyncio.Event()

    def on_message(self, peer: Identity, message: Struct) -> None:
        match message:
            case TextDeltas():
                self._deltas(message)
            case Accepted():
                for handle in message.handles:
                    if handle in self._rows:
                        request = self._rows[handle][0]
                        request.prompt_token_ids = unpack_i32(message.prompt_token_ids).tolist()
                        request.prompt = message.prompt_text
            case Rejected():
                for handle in message.handles:
                    self._errors.append(f"{message.param}: {message.message}" if message.param else message.message)
                    self._end(handle)
            case TokenizeReply():
                self._asked.pop(message.handle).set_result(message)
            case MeshStats():
                self._mesh_serves = message.serving
                self._note_serving()

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        self._note_serving()

    def _note_serving(self) -> None:
        """Requests can be served once the coordinator says so and a detokenizer can be reached from here."""
        if self._mesh_serves and self.mesh is not None and self.mesh.peers(Role.DETOKENIZER):
            self.serving.set()

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        if peer.role is Role.DETOKENIZER and self._rows:
            self._errors.append(f"{peer}: {reason}")
            for handle in list(self._rows):
                self._end(handle)

    def flush(self) -> None:
        """Nothing is batched here."""

    async def run(self, submits: list[tuple[Submit, RequestOutput]], bar: Any) -> None:
        """Send all; return when all have ended. StartError with the first refusal."""
        assert self.mesh is not None
        self._bar, self._errors = bar, []
        self._all_done.clear()
        peers = self.mesh.peers(Role.DETOKENIZER)
        for number, (submit, request) in enumerate(submits):
            handles = []
            for output in request.outputs:
                self._next = self._next % 0x7FFF_FFFF + 1
                handles.append(Handle(self._next))
                self._rows[self._next] = (request, output)
            self.mesh.send(peers[number % len(peers)], msgspec.structs.replace(submit, handles=tuple(handles)))
        if self._rows:
            await self._all_done.wait()
        if self._errors:
            raise ValueError(self._errors[0])

    async def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Ask a detokenizer for the ids of each text. ValueError when it refuses one."""
        assert self.mesh is not None
        (peer, *_) = self.mesh.peers(Role.DETOKENIZER)
        replies: list[asyncio.Future[TokenizeReply]] = []
        for text in texts:
            self._next = self._next % 0x7FFF_FFFF + 1
            self._asked[self._next] = future = asyncio.get_running_loop().create_future()
            replies.append(future)
            self.mesh.send(peer, Tokenize(Handle(self._next), TextPrompt(text)))
        found = []
        for reply in replies:
            answer = await reply
            if answer.error:
                raise ValueError(answer.error)
            found.append(unpack_i32(answer.token_ids).tolist())
        return found

    def _deltas(self, message: TextDeltas) -> None:
        handles, tokens = unpack_i32(message.handles).tolist(), unpack_i32(message.token_ids)
        counts = unpack_i32(message.counts).tolist() if message.counts else [1] * len(handles)
        finished = {end.row: end for end in message.finished}
        at = 0
        for row, (handle, count) in enumerate(zip(handles, counts, strict=True)):
            known = self._rows.get(handle)
            if known is not None:
                request, output = known
                output.token_ids += tokens[at : at + count].tolist()
                output.text += message.texts[row]
                self._details(message, row, request, output)
                if row in finished:
                    self._finish(handle, output, finished[row])
            at += count

    def _details(self, message: TextDeltas, row: int, request: RequestOutput, output: CompletionOutput) -> None:
        if row in message.logprobs:
            output.logprobs = (output.logprobs or []) + message.logprobs[row]
            output.cumulative_logprob = sum(position.token.logprob for position in output.logprobs)
        if row in message.prompt_logprobs:
            request.prompt_logprobs = message.prompt_logprobs[row]
        if row in message.num_cached_tokens:
            request.num_cached_tokens = message.num_cached_tokens[row]

    def _finish(self, handle: int, output: CompletionOutput, end: Finished) -> None:
        output.finish_reason, output.stop_reason = end.reason.value, end.stop_reason
        if end.reason is FinishReason.ERROR:
            self._errors.append(end.message)
        self._end(handle)

    def _end(self, handle: int) -> None:
        del self._rows[handle]
        if self._bar is not None:
            self._bar.update(1)
        if not self._rows:
            self._all_done.set()


class LLM:
    """A model in a mesh of its own. Keyword arguments are the flags of `meshlm serve`, with underscores."""

    def __init__(self, model: str = "", **settings: Any) -> None:
        names = {setting.name for setting in flags.settings()}
        unknown = sorted(settings.keys() - names)
        if unknown:
            raise TypeError(f"LLM: unknown argument {unknown[0]!r}")
        config = flags.build({**settings, "model": model}, None)
        self._folder = tempfile.TemporaryDirectory(prefix="mlm")
        run_dir = Path(self._folder.name) / "run"
        rundir.create(run_dir)
        config = resolve.resolve(config)
        run = msgspec.structs.replace(config.run, run_dir=str(run_dir))
        self._config: MeshConfig = msgspec.structs.replace(config, run=run)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meshlm", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            self._supervisor, self._client = self._call(self._start())
        except BaseException:
            self._stop_loop()
            raise

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids). Results in the order of the prompts. ValueError for bad input."""
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        items: list[Any] = [prompts] if single else list(prompts)
        made: list[Prompt] = [
            TextPrompt(item) if isinstance(item, str) else TokenPrompt(pack_i32(item)) for item in items
        ]
        return self._run(made, sampling_params, use_tqdm)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, with the model's chat template."""
        many = bool(messages) and isinstance(messages[0], list)
        conversations: list[Any] = list(messages) if many else [messages]
        made: list[Prompt] = [
            ChatPrompt(
                messages_json=msgspec.json.encode(conversation),
                chat_template=chat_template or "",
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
            )
            for conversation in conversations
        ]
        return self._run(made, sampling_params, use_tqdm)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        assert self._config.resolved is not None
        return self._config.resolved.spec.vocab_size

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts, by the mesh's own tokenizer."""
        return self._call(self._client.tokenize(list(texts)))

    def start_profile(self) -> None:
        """Begin a profiler trace in every worker; needs `profiler_dir`. ValueError says why it cannot."""
        self._profile(start=True)

    def stop_profile(self) -> tuple[str, ...]:
        """End the trace: the files that were written, one a worker."""
        return self._profile(start=False)

    def _profile(self, *, start: bool) -> tuple[str, ...]:
        answer = self._call(self._supervisor.profile(start=start))
        if answer.error:
            raise ValueError(answer.error)
        return answer.paths

    def shutdown(self) -> None:
        """End all processes. Called at exit by itself."""
        if self._loop.is_running():
            self._call(self._stop())
            self._stop_loop()
            self._folder.cleanup()

    def _run(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} sampling_params")
        submits = [self._submit(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        total = sum(len(request.outputs) for _, request in submits)
        with tqdm(total=total, desc="Generating", disable=not use_tqdm, dynamic_ncols=True) as bar:
            self._call(self._client.run(submits, bar))
        return [request for _, request in submits]

    def _submit(self, prompt: Prompt, params: SamplingParams) -> tuple[Submit, RequestOutput]:
        assert self._config.resolved is not None
        name = uuid.uuid4().hex
        submit = Submit(
            handles=(),
            request_ids=tuple(RequestId(f"{name}-{index}") for index in range(params.n)),
            prompt=prompt,
            sampling=params.wire(self._config.resolved.eos_token_ids),
            text=params.text(),
            max_tokens=params.max_tokens,
            want_prompt=True,
            arrival_s=time.time(),
        )
        return submit, RequestOutput(name, None, [], [CompletionOutput(index) for index in range(params.n)])

    # --- the background loop ---

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> tuple[io.Supervisor, _Client]:
        members = [identity for identity in io.identities(self._config) if identity.role is not Role.FRONTEND]
        supervisor = io.Supervisor(self._config, members, StartDisplay())
        client = _Client()
        await supervisor.start()
        client.mesh = Mesh(Identity(Role.FRONTEND, 0), Incarnation(time.time_ns()), self._config, client)
        await client.mesh.open()
        serving = asyncio.ensure_future(client.serving.wait())
        either: set[asyncio.Future[Any]] = {serving, supervisor.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if supervisor.ended.done():
            serving.cancel()
            await supervisor.close()
            await client.mesh.close()
            supervisor.ended.result()
            raise StartError("the mesh ended while it started")
        return supervisor, client

    async def _stop(self) -> None:
        self._supervisor.stop(0.0)
        await asyncio.wait({self._supervisor.ended}, timeout=5)
        if self._client.mesh is not None:
            await self._client.mesh.close()
        await self._supervisor.close()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        atexit.unregister(self.shutdown)


__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
