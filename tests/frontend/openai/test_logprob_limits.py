"""Log-probabilities that only what comes tells the number of: a request beyond a limit ends with 400, its field and the limit."""

import msgspec
import pytest
from answering import LENGTH, asking, give, logprob, streamed, whole

from meshlm.frontend.openai import limits
from meshlm.frontend.openai.responses import WholeResponse
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.protocol.edges.text import Accepted, PositionLogprobs, Retry

POSITION = PositionLogprobs(logprob(5, -1.0, "a"), 1)


def accept(answer: WholeResponse | StreamResponse, *lengths: int) -> None:
    """The prompts have these lengths."""
    answer.prompt.clear()
    answer._num_prompt_logprobs = 0
    for choice in answer.choices:
        answer.accepted(choice, Accepted((choice.handle,), lengths[choice.prompt_index]))


def refusal(answer: WholeResponse | StreamResponse) -> tuple[int, str, str]:
    assert answer.is_refused
    assert answer.error is not None
    return answer.error.status, answer.error.param, answer.error.message


def test_prompts_of_a_request_have_a_limit_together() -> None:
    """Each prompt had one of its own: those of 2,048 prompts in one request were an answer of gigabytes."""
    most = limits.MAX_PROMPT_LOGPROBS // (21 * 2)
    answer, ends = whole(asking(False, prompt_logprobs=20, num_choices=2, num_returned=2), num_prompts=3)
    accept(answer, most // 2, most // 3, most // 7)
    assert (answer.error, ends.count) == (None, 0)
    accept(answer, most // 2, most // 3, most // 3)
    status, param, message = refusal(answer)
    assert (status, param) == (400, "prompt_logprobs")
    assert str(limits.MAX_PROMPT_LOGPROBS) in message
    assert ends.count >= 1, "who waits for the answer was not told"


def test_without_log_probabilities_prompts_are_as_long_as_they_like() -> None:
    answer, _ = whole(asking(False), num_prompts=2)
    accept(answer, 1 << 30, 1 << 30)
    assert not answer.is_refused


@pytest.mark.parametrize("logprobs", [0, 20])
def test_a_long_prompt_with_log_probabilities_is_not_echoed_in_a_stream(logprobs: int) -> None:
    """The loop made a quarter of a million entries of it at once: all other streams waited for a second."""
    most = limits.MAX_STREAMED_ECHO // (1 + logprobs)
    ask = asking(False, echo=True, logprobs=logprobs, prompt_logprobs=logprobs)
    answer, events, _ = streamed(ask)
    accept(answer, most)
    assert not answer.is_refused
    answer, events, ends = streamed(ask)
    accept(answer, most + 1)
    status, param, message = refusal(answer)
    assert (status, param, ends.count) == (400, "logprobs", 1)
    assert "stream" in message
    give(answer, 0, [5], "a", LENGTH, [POSITION])
    assert events == [], "a row that was on its way begins no stream"
    not_streamed, _ = whole(ask)
    accept(not_streamed, most + 1)
    assert not not_streamed.is_refused


@pytest.mark.parametrize("keyed", [False, True])
def test_an_answer_that_is_kept_has_a_limit(keyed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 sequences with 21 entries for each token filled the frontend's memory until it died."""
    monkeypatch.setattr(limits, "MAX_KEPT_LOGPROBS", 6 * 3)
    ask = asking(False, logprobs=2, num_choices=2, num_returned=2)
    answer: WholeResponse | StreamResponse
    plain, _, _ = streamed(ask)
    for _ in range(20):
        give(plain, 0, [5], "a", logprobs=[POSITION])
    assert not plain.is_refused, "a stream keeps nothing"
    answer = streamed(ask)[0] if keyed else whole(ask)[0]
    for choice in answer.choices:
        choice.submit = msgspec.structs.replace(choice.submit, retry=Retry("k", b"") if keyed else None)
    for number in range(6):
        give(answer, number % 2, [5], "a", logprobs=[POSITION])
    assert not answer.is_refused
    give(answer, 1, [5], "a", logprobs=[POSITION])
    status, param, message = refusal(answer)
    assert (status, param) == (400, "logprobs")
    assert "18" in message
