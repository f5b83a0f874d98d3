"""What the metrics observe of requests: of tokens as they come, of sequences when they end. Called by io.py.

As in vLLM each sequence is a request of its own; `n` and the longest choice are observed once for each prompt. A request that was
refused is observed nowhere, and one without a token has no latency. Where the client left a sequence is counted as aborted, with its
latency up to the last token that came, since its tokens count, too. With an Idempotency-Key it goes on without its client: the
connection that sees its end counts it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshlm.frontend.dashboard.feed import Feed
from meshlm.frontend.openai.responses import Response
from meshlm.protocol.wire.ids import ErrorKind, FinishReason
from meshlm.runtime.client.choice import Choice
from meshlm.runtime.client.request_tracker import RequestTracker

if TYPE_CHECKING:  # prometheus_client must not be imported before its directory is set
    from meshlm.frontend.observe.metrics import Metrics

CHOICES_AT_ONCE = 256  # a millisecond or two
_FAILURES = (
    ErrorKind.INTERNAL,
    ErrorKind.TIMEOUT,
    ErrorKind.POISON,
)  # of a request that was let in; all else refuses it


def observe_tokens(metrics: "Metrics", tracker: RequestTracker, feed: Feed) -> None:
    """Observes what came since the last call: first tokens, the times between tokens, their number. The dashboard has them too."""
    begun, counts = tracker.take_counts()
    prompt_tokens: dict[str, tuple[int, int]] = {}  # and those of them that were cached
    for choice in begun:
        metrics.engine(choice.engine).ttft.observe(choice.first_at - choice.opened_at)
        feed.first_token(choice.first_at - choice.opened_at)
        before, cached = prompt_tokens.get(choice.engine, (0, 0))
        prompt_tokens[choice.engine] = before + choice.num_prompt_tokens, cached + _num_cached(choice)
    for name, (count, cached) in prompt_tokens.items():
        metrics.engine(name).prefilled(count, cached)
    for name, came in counts.items():
        engine = metrics.engine(name)
        for interval, times in came.intervals.items():
            engine.itl.observe(interval, times)
            feed.interval(interval, times)
        if came.num_tokens:
            engine.generation_tokens.inc(came.num_tokens)
    metrics.flush()


def observe_end(metrics: "Metrics", answer: Response, max_model_len: int) -> Iterator[None]:
    """The HTTP request is over, by its answer or since its client left. Yields where others may have their turn."""
    whole: dict[int, list[Choice]] = {}
    for number, choice in enumerate(answer.choices, 1):
        if number % CHOICES_AT_ONCE == 0:
            yield
        finished, engine = choice.finished, metrics.engine(choice.engine)
        if finished is None and choice.submit.retry is not None:
            continue
        if _was_told(choice) or _was_refused(choice):
            continue
        engine.finished(FinishReason.ABORT if finished is None else finished.reason)
        if choice.first_at:
            _observe_sequence(metrics, answer, choice, max_model_len)
            whole.setdefault(choice.prompt_index, []).append(choice)
    for choices in whole.values():
        if len(choices) == answer.parsed_request.mesh.num_choices:
            engine = metrics.engine(choices[0].engine)
            engine.n.observe(answer.parsed_request.answer.num_returned)
            engine.longest.observe(max(len(choice.token_ids) for choice in choices))
    metrics.flush()


def _observe_sequence(metrics: "Metrics", answer: Response, choice: Choice, max_model_len: int) -> None:
    engine, num_tokens = metrics.engine(choice.engine), len(choice.token_ids)
    retry, decode_s = choice.submit.retry, choice.last_at - choice.first_at
    before_s = max(0.0, choice.submit.arrival_s - retry.begun_s) if retry is not None and retry.begun_s else 0.0
    engine.e2e.observe(before_s + choice.last_at - choice.opened_at)
    engine.prompt.observe(choice.num_prompt_tokens)
    engine.generation.observe(num_tokens)
    engine.computed.observe(choice.num_prompt_tokens - _num_cached(choice))
    if not answer.parsed_request.answer.prompt_only:
        engine.max_tokens.observe(answer.parsed_request.mesh.max_tokens or max_model_len - choice.num_prompt_tokens)
    if choice.num_told:
        return  # the tokens came once more, all at once
    if num_tokens > 1:
        engine.tpot.observe(decode_s / (num_tokens - 1))
    if choice.first is not None:
        engine.phases(choice.first, decode_s)


def _num_cached(choice: Choice) -> int:
    """Its prompt tokens that its rank had computed before."""
    return max(0, choice.first.num_cached_tokens) if choice.first is not None else 0


def _was_told(choice: Choice) -> bool:
    """An earlier connection had all of it, and counted it."""
    return choice.submit.retry is not None and 0 < len(choice.token_ids) <= choice.num_told


def _was_refused(choice: Choice) -> bool:
    """Whether it was refused after its submission: by its prompt's length, a full queue, or a key that stands for another request."""
    end = choice.finished
    return end is not None and end.reason is FinishReason.ERROR and end.kind not in _FAILURES and not choice.first_at
