"""`AsyncLLM`: the same mesh as `LLM`, for programs with an event loop. Answers come as they are written.

The mesh lives in the background thread of an `LLM` (background.py); any number of event loops may use it.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from meshlm.supervisor.api.arguments import EngineArgs, refuse
from meshlm.supervisor.api.background import T, end_of, unless_ended
from meshlm.supervisor.api.client import Sent
from meshlm.supervisor.api.llm import LLM
from meshlm.supervisor.api.lora import LoRARequest, extras_of
from meshlm.supervisor.api.offline_prompts import OnePrompt, of_generate, of_tokenization
from meshlm.supervisor.api.outputs import CompletionOutput, OutputStream, Progress, RequestOutput
from meshlm.supervisor.api.sampling import RequestOutputKind, SamplingParams
from meshlm.supervisor.api.submits import check_priority
from meshlm.supervisor.api.tokenizer import Tokenizer
from meshlm.supervisor.api.vectors import PoolingParams, PoolingRequestOutput
from meshlm.supervisor.errors import StartError


class _Online(LLM):
    """With the settings of `meshlm serve`: requests come one by one, and somebody reads along. It ends with the program, though."""

    _settings: ClassVar[dict[str, Any]] = {"orphan_grace": 0}


class AsyncLLM:
    """A model in a mesh of its own. Keyword arguments are the flags of `meshlm serve`, with underscores; making it takes as long as
    the start. The processes end with `shutdown`, with the last reference to the object, or with the program."""

    def __init__(self, model: str = "", **settings: Any) -> None:
        self._llm = _Online(model, **settings)
        self._open: dict[str, Future[Any]] = {}  # by the name of the request

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> "AsyncLLM":
        """With the settings of an AsyncEngineArgs; vLLM's further arguments say who calls it, and change nothing."""
        return cls(**engine_args.given())

    async def generate(
        self,
        prompt: OnePrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, as `LLM.generate` takes it. Gives all that is there so far each time something came, or what is new,
        or the whole at the end: `sampling_params.output_kind`. ValueError for bad input, StartError when the mesh has ended. Who stops
        reading aborts the request."""
        (extras,) = extras_of(lora_request, 1, self._llm._config)
        options, keep = of_tokenization(tokenization_kwargs)
        options["mm_processor_kwargs"] = self._llm.checked_kwargs(mm_processor_kwargs)
        given = of_generate(prompt, **options, sizes=self._llm.embeds_sizes, hears=self._llm.hears)
        given = given._replace(extras=extras)
        (params,), ranks = self._llm._submits.checked(sampling_params, 1, [priority], keep)
        rank = -1 if data_parallel_rank is None else data_parallel_rank
        (sent,) = self._llm._submits.of(iter([given]), [params], ranks, rank)
        name = self._new_name(request_id)
        stream, progress = OutputStream(params.output_kind), Progress(sent.request, name, params)
        work = self._open[name] = self._llm._background.start(self._follow(sent, params, stream, progress))
        try:
            async for found in stream.read():
                yield found
        finally:
            del self._open[name]
            work.cancel()

    async def encode(
        self,
        prompt: OnePrompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Gives one prompt's vector or scores, once, as `LLM.encode` makes them; `pooling_params.task` says which. ValueError for bad
        input, StartError when the mesh has ended. An aborted request gives nothing. trace_headers change nothing."""
        refuse(lora_request=lora_request)
        check_priority(priority != 0, self._llm._config)
        name = self._new_name(request_id)
        work = self._llm._vectors.begin(prompt, pooling_params, priority, tokenization_kwargs)
        self._open[name] = work
        try:
            yield await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise  # whoever reads was cancelled, and the request with it
        finally:
            del self._open[name]
            work.cancel()

    def _new_name(self, request_id: str | None) -> str:
        name = request_id or uuid.uuid4().hex
        if name in self._open:
            raise ValueError(f"request_id: {name!r} is the name of a request that runs")
        return name

    async def _follow(self, sent: Sent, params: SamplingParams, stream: OutputStream, progress: Progress) -> None:
        """In the mesh's loop: push what comes until the request's end."""
        final_only = params.output_kind is RequestOutputKind.FINAL_ONLY

        def news(changed: list[CompletionOutput]) -> None:
            stream.push(progress.take(changed))

        background, request, error = self._llm._background, sent.request, None
        work = background.client.run(iter([sent]), None, None if final_only else news)
        try:
            await unless_ended(background.supervisor, work)
            if final_only:
                stream.push(progress.take(request.outputs))
        except asyncio.CancelledError:  # by `abort`: its reader hears of that as of any other end
            for output in request.outputs:
                output.finish_reason = output.finish_reason or "abort"
            stream.push(progress.take(request.outputs))
        except (ValueError, StartError) as found:
            error = found
        finally:
            stream.end(error)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End these requests, which get the finish_reason "abort"; a name that is not known is ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if (work := self._open.get(name)) is not None:
                work.cancel()

    def get_tokenizer(self) -> Tokenizer:
        """The mesh's tokenizer, with its chat template; its methods wait for the mesh."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the defaults of the model's generation_config.json."""
        return self._llm.get_default_sampling_params()

    async def start_profile(self) -> None:
        """Begin a profiler trace in every worker; needs `profiler_dir`. ValueError says why it cannot."""
        await self._in_mesh(self._llm._operator.profile(True))

    async def stop_profile(self) -> tuple[str, ...]:
        """End the trace: the files that were written, one a worker."""
        return await self._in_mesh(self._llm._operator.profile(False))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Later requests find nothing of what is computed now. False while requests run that are not to be computed anew."""
        return await self._in_mesh(self._llm._operator.reset_prefix_cache(reset_running_requests))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """As `LLM.sleep`; with mode "wait" once all that runs has ended."""
        if mode == "wait":
            if self._open:
                await asyncio.wait([asyncio.wrap_future(work) for work in self._open.values()])
            mode = "keep"
        await self._in_mesh(self._llm._operator.sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As `LLM.wake_up`."""
        await self._in_mesh(self._llm._operator.wake_up(tags))

    async def is_sleeping(self) -> bool:
        """Whether it sleeps, at whatever level."""
        return self._llm._operator.is_sleeping

    async def _in_mesh(self, work: Coroutine[Any, Any, T]) -> T:
        background = self._llm._background
        return await asyncio.wrap_future(background.start(unless_ended(background.supervisor, work)))

    async def check_health(self) -> None:
        """StartError with the reason when the mesh has ended."""
        if self.errored:
            raise self.dead_error

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whether the mesh has ended."""
        return self._llm._background.supervisor.ended.done()

    @property
    def errored(self) -> bool:
        """Whether the mesh has ended, for whatever reason."""
        return self.is_stopped

    @property
    def dead_error(self) -> StartError:
        """The reason of the mesh's end, as an error of the caller's own."""
        return end_of(self._llm._background.supervisor)

    def shutdown(self, timeout: float | None = None) -> None:
        """End all processes; what still runs ends with an error."""
        self._llm.shutdown()
