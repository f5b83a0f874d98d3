"""Chunks and ends of Generate calls: whatever is taken when, each token is sent once and each choice ends once."""

from answering import Ends, asking, filled, logprob, of_prompt
from hypothesis import given
from hypothesis import strategies as st

from meshlm.frontend.grpc.messages import GrpcResponse
from meshlm.frontend.openai.responses import AnswerHead
from meshlm.protocol.edges.text import Finished, PositionLogprobs, PromptLogprobs
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.ids import ErrorKind, FinishReason
from meshlm.runtime.client.placement import RowDetails


def answering(*, stream: bool, n: int = 1, logprobs: int = -1, prompt_logprobs: int = -1) -> tuple[GrpcResponse, Ends]:
    ends = Ends()
    ask = asking(False, stream=stream, num_choices=n, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    answer = filled(GrpcResponse(AnswerHead(ask, "grpc-1", 0, "tiny", ends)))
    for choice in answer.choices:
        choice.num_prompt_tokens = 2
    return answer, ends


def give(
    answer: GrpcResponse,
    index: int,
    token_ids: list[int],
    finished: Finished | None = None,
    logprobs: list[PositionLogprobs] | None = None,
    prompt: PromptLogprobs | None = None,
    num_cached: int | None = None,
) -> None:
    choice = answer.choices[index]
    choice.token_ids.extend(token_ids)
    choice.finished = finished
    first = None if num_cached is None else First(num_cached)
    answer.row(choice, len(token_ids), "", RowDetails(finished, logprobs, prompt, first))


ROWS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 99), max_size=3), st.booleans()), max_size=30)


@given(ROWS, st.booleans())
def test_each_token_once_whenever_it_is_taken(rows: list[tuple[int, list[int], bool]], stream: bool) -> None:
    answer, _ = answering(stream=stream, n=3)
    chunks: dict[int, list[int]] = {0: [], 1: [], 2: []}
    ended: dict[int, list[int]] = {}

    def take() -> None:
        for message in answer.take():
            if message.HasField("chunk"):
                assert message.chunk.completion_tokens == len(message.chunk.token_ids) > 0
                chunks[message.chunk.index] += message.chunk.token_ids
            else:
                assert message.complete.index not in ended
                ended[message.complete.index] = list(message.complete.output_ids)

    for index, token_ids, takes in rows:
        give(answer, index, token_ids)
        if takes:
            take()
    for index in range(3):
        assert not answer.is_over
        give(answer, index, [7], Finished(0, FinishReason.STOP))
    assert answer.is_over
    take()
    take()
    expected = {index: [t for i, ids, _ in rows if i == index for t in ids] + [7] for index in range(3)}
    assert (chunks if stream else ended) == expected
    assert set(ended) == {0, 1, 2}


def test_the_end_says_why_and_how_many() -> None:
    answer, ends = answering(stream=False)
    give(answer, 0, [4, 5], num_cached=1)
    assert (answer.take(), ends.count) == ([], 0)
    give(answer, 0, [6], Finished(0, FinishReason.STOP, 6))
    (message,) = answer.take()
    end = message.complete
    assert (list(end.output_ids), end.finish_reason, end.matched_token_id) == ([4, 5, 6], "stop", 6)
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (2, 3, 1)
    assert end.WhichOneof("matched_stop") == "matched_token_id"
    assert ends.count == 1


def test_log_probabilities_are_told_once() -> None:
    answer, _ = answering(stream=True, logprobs=1, prompt_logprobs=1)
    of_four = PositionLogprobs(logprob(4, -0.5, "a"), 1, (logprob(4, -0.5, "a"), logprob(9, -2.0, "b", 2)))
    of_second = PositionLogprobs(logprob(6, -0.25, "c"), 1, (logprob(8, -0.125, "d"),))
    give(answer, 0, [4], logprobs=[of_four], prompt=of_prompt(5, of_second))
    (message,) = answer.take()
    found = message.chunk.output_logprobs
    assert (list(found.token_ids), list(found.token_logprobs)) == ([4], [-0.5])
    assert [(list(top.token_ids), list(top.values)) for top in found.top_logprobs] == [([4], [-0.5])]
    prompt = message.chunk.input_logprobs
    assert list(prompt.token_ids) == [5, 6]
    assert [value.HasField("value") for value in prompt.token_logprobs] == [False, True]
    assert [list(top.token_ids) for top in prompt.top_logprobs] == [[], [8]]
    give(answer, 0, [], Finished(0, FinishReason.LENGTH))
    (message,) = answer.take()
    assert not message.complete.HasField("output_logprobs")
    assert not message.complete.HasField("input_logprobs")


def test_an_aborted_call_ends_as_aborted() -> None:
    answer, ends = answering(stream=True, n=2)
    give(answer, 0, [1], Finished(0, FinishReason.STOP))
    give(answer, 1, [2])
    answer.abort()
    assert answer.is_over
    assert ends.count > 0
    found = [(m.complete.index, m.complete.finish_reason) for m in answer.take() if m.HasField("complete")]
    assert found == [(0, "stop"), (1, "abort")]


def test_an_error_is_the_callers_to_raise() -> None:
    answer, ends = answering(stream=True)
    answer.failed(answer.choices[0], ErrorKind.OVERLOADED, "full", "")
    assert ends.count == 1
    assert answer.is_over
    assert answer.error is not None
    assert answer.error.status == 503
