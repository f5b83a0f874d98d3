"""The results of `LLM.generate`, with vLLM's names, which client.py fills, and what a caller of `AsyncLLM.generate` gets of them while
a request runs: copies that are made in the mesh's thread and read in the caller's event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace

from meshlm.protocol.edges.text import PositionLogprobs
from meshlm.runtime.client.draft_metrics import SpecDecodeMetrics
from meshlm.supervisor.api.sampling import RequestOutputKind, SamplingParams


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability (natural log), its place among all tokens (1 = likeliest), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def logprobs_of(position: PositionLogprobs) -> dict[int, Logprob]:
    """Log-probabilities by token id: the sampled (or prompt) token first, then the likeliest."""
    return {t.token_id: Logprob(t.logprob, t.rank, t.text) for t in (position.token, *position.top)}


@dataclass
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None  # with per_request_spec_decode_metrics, at its end
    pooled: bytes = field(default=b"", repr=False)  # of a Pool task: float32
    routed_experts: None = None  # vLLM's names for what is not there
    lora_request: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One prompt's sequences."""

    request_id: str
    prompt: str | None  # None for one of token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: None = None  # vLLM's names for what is not there
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    is_last: bool | None = field(default=None, repr=False)  # of copies by `AsyncLLM.generate`, which may lack sequences

    @property
    def finished(self) -> bool:
        return all(output.finished() for output in self.outputs) if self.is_last is None else self.is_last


class Progress:
    """Copies of a request's outputs, as they are when they are taken; with DELTA of what no copy before had. In the mesh's thread."""

    def __init__(self, request: RequestOutput, request_id: str, params: SamplingParams) -> None:
        self._request, self._request_id, self._params = request, request_id, params
        self._told: dict[int, tuple[int, int]] = {}  # by sequence: tokens and characters

    def take(self, changed: Iterable[CompletionOutput]) -> RequestOutput:
        outputs = sorted((self._copy(output) for output in changed), key=lambda output: output.index)
        return replace(self._request, request_id=self._request_id, outputs=outputs, is_last=self._request.finished)

    def _copy(self, output: CompletionOutput) -> CompletionOutput:
        delta = self._params.output_kind is RequestOutputKind.DELTA
        tokens, chars = self._told.get(output.index, (0, 0)) if delta else (0, 0)
        self._told[output.index] = len(output.token_ids), len(output.text)
        return replace(
            output,
            text=output.text[chars:] if self._params.detokenize else "",
            token_ids=output.token_ids[tokens:],
            logprobs=output.logprobs[tokens:] if output.logprobs is not None else None,
        )


class OutputStream:
    """The copies that came and were not read, as one. Made in the caller's event loop; `push` and `end` are for other threads."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._loop = asyncio.get_running_loop()
        self._joins = kind is RequestOutputKind.DELTA
        self._waiting: RequestOutput | None = None
        self._ended = False
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def push(self, found: RequestOutput) -> None:
        self._call(found, False, None)

    def end(self, error: Exception | None) -> None:
        self._call(None, True, error)

    async def read(self) -> AsyncIterator[RequestOutput]:
        """Gives what came, until the end or its error."""
        while True:
            await self._news.wait()
            self._news.clear()
            if (found := self._waiting) is not None:
                self._waiting = None
                yield found
            if self._ended and self._waiting is None:
                if self._error is not None:
                    raise self._error
                return

    def _call(self, found: RequestOutput | None, ended: bool, error: Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
            self._loop.call_soon_threadsafe(self._take, found, ended, error)

    def _take(self, found: RequestOutput | None, ended: bool, error: Exception | None) -> None:
        if found is not None:
            self._waiting = found if self._waiting is None else joined(self._waiting, found, delta=self._joins)
        if ended:
            self._ended, self._error = True, error
        self._news.set()


def joined(before: RequestOutput, after: RequestOutput, *, delta: bool) -> RequestOutput:
    outputs = {output.index: output for output in before.outputs}
    for output in after.outputs:
        old = outputs.get(output.index)
        if delta and old is not None:
            logprobs = None if output.logprobs is None else [*(old.logprobs or ()), *output.logprobs]
            text, token_ids = old.text + output.text, old.token_ids + output.token_ids
            output = replace(output, text=text, token_ids=token_ids, logprobs=logprobs)
        outputs[output.index] = output
    return replace(after, outputs=[outputs[index] for index in sorted(outputs)])
