"""What a caller of `AsyncLLM.generate` reads is the whole, however much of it comes between two looks."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.supervisor.api.outputs import CompletionOutput, Logprob, OutputStream, Progress, RequestOutput
from meshlm.supervisor.api.sampling import RequestOutputKind, SamplingParams

LIMIT_S = 10.0
# Which sequence gets a token, and whether the caller looks then.
STEPS = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=40)


def grown(output: CompletionOutput, token: int) -> None:
    output.token_ids.append(token)
    output.text += f"<{token}>"
    output.logprobs = [*(output.logprobs or []), {token: Logprob(-float(token))}]


async def read(steps: list[tuple[int, bool]], kind: RequestOutputKind) -> tuple[RequestOutput, list[RequestOutput]]:
    """The request as it is in the end, and what a caller got of it."""
    request = RequestOutput("inner", "p", [1], [CompletionOutput(index) for index in range(3)])
    progress = Progress(request, "r", SamplingParams(n=3, output_kind=kind))
    stream, found = OutputStream(kind), list[RequestOutput]()

    async def caller() -> None:
        found.extend([one async for one in stream.read()])

    reading = asyncio.ensure_future(caller())
    for token, (index, looks) in enumerate(steps):
        grown(request.outputs[index], token)
        stream.push(progress.take([request.outputs[index]]))
        for _ in range(3 if looks else 0):
            await asyncio.sleep(0)
    for output in request.outputs:
        output.finish_reason = "length"
        stream.push(progress.take([output]))
    stream.end(None)
    await asyncio.wait_for(reading, LIMIT_S)
    return request, found


@given(STEPS)
def test_deltas_are_the_whole_in_pieces(steps: list[tuple[int, bool]]) -> None:
    request, found = asyncio.run(read(steps, RequestOutputKind.DELTA))
    for whole in request.outputs:
        pieces = [output for one in found for output in one.outputs if output.index == whole.index]
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [one for piece in pieces for one in piece.logprobs or ()] == (whole.logprobs or [])
        assert pieces[-1].finish_reason == "length"
    assert [one.finished for one in found] == [False] * (len(found) - 1) + [True]


@given(STEPS)
def test_all_that_is_there_so_far(steps: list[tuple[int, bool]]) -> None:
    request, found = asyncio.run(read(steps, RequestOutputKind.CUMULATIVE))
    for whole in request.outputs:
        seen = [output for one in found for output in one.outputs if output.index == whole.index]
        for one in seen:
            so_far = whole.token_ids[: len(one.token_ids)]
            assert (one.token_ids, one.text) == (so_far, "".join(f"<{token}>" for token in so_far))
        assert seen[-1] == whole
        assert [len(one.token_ids) for one in seen] == sorted(len(one.token_ids) for one in seen)
    assert {one.request_id for one in found} == {"r"}


async def test_the_error_comes_behind_what_came() -> None:
    stream = OutputStream(RequestOutputKind.CUMULATIVE)
    request = RequestOutput("r", None, [1], [CompletionOutput(0)])
    stream.push(replace(request, is_last=False))
    stream.end(ValueError("no room"))
    reading = stream.read()
    assert (await anext(reading)).prompt_token_ids == [1]
    with pytest.raises(ValueError, match="no room"):
        await anext(reading)


def test_a_loop_that_is_closed_reads_nothing() -> None:
    async def made() -> OutputStream:
        return OutputStream(RequestOutputKind.DELTA)

    stream = asyncio.run(made())
    stream.push(RequestOutput("r", None, [1], []))
    stream.end(None)
