"""The prompts of a large request are asked for as its sequences begin: never too many at once, and all of them in the end."""

import asyncio
import random
from collections import Counter

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Scripted
from tracker_bench import D0, a_desk, opened

from meshlm.frontend.requests import pacing
from meshlm.frontend.requests.pacing import Pace
from meshlm.protocol.edges.text import Finished, Submit
from meshlm.protocol.wire.ids import FinishReason
from meshlm.runtime.client.placement import Choice

LIMIT_S = 10.0


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(1, 24), st.randoms(use_true_random=False))
def test_as_many_wait_as_may_and_all_are_asked_for(sizes: list[int], most: int, dice: random.Random) -> None:
    pace = Pace(most)
    waiting: list[Choice] = []
    for size in sizes:
        while not pace.room(size):
            assert waiting, "nothing waits, and no more may be asked for"
            begun = waiting.pop(dice.randrange(len(waiting)))
            if dice.random() < 0.5:
                begun.first_at = 1.0
            else:
                begun.finished = Finished(0, FinishReason.STOP)  # as one that has a vector and no token
        choices = opened(a_desk(), n=size)[0].choices
        pace.asked(choices)
        waiting += choices
        assert len(waiting) <= max(most, size)


class Windowed(Scripted):
    """Counts the sequences that wait for their first token."""

    def __init__(self) -> None:
        super().__init__()
        self.go.clear()
        self.asked: list[Choice] = []
        self.most = 0
        self.news = asyncio.Event()

    def open(self, choices: list[Choice], submit: Submit) -> None:
        self.asked += choices
        self.most = max(self.most, sum(choice.finished is None for choice in self.asked))
        super().open(choices, submit)
        self.news.set()

    async def until(self, num: int) -> None:
        """So many were asked for."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.asked) < num:
                self.news.clear()
                await self.news.wait()
        for _ in range(50):
            await asyncio.sleep(0)  # one more would come in one of these turns


async def ask(backend: Windowed, **body: object) -> httpx.Response:
    transport = httpx.ASGITransport(app=backend.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=LIMIT_S) as client:
        return await client.post("/v1/completions", json={"max_tokens": 2, **body})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_large_request_does_not_come_all_at_once(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(pacing, "MOST_WAITING", 16)
    backend = Windowed()
    answer = asyncio.ensure_future(ask(backend, prompt=["a"] * 20, n=3, stream=stream))
    await backend.until(15)
    assert len(backend.asked) == 15, "five prompts, as three more sequences would be too many"
    backend.go.set()
    found = await asyncio.wait_for(answer, LIMIT_S)
    assert (found.status_code, len(backend.asked), backend.most) == (200, 60, 15)
    if not stream:
        assert Counter(choice["text"] for choice in found.json()["choices"]) == {"Hello you": 60}
    assert {choice.index for choice in backend.closed} == set(range(60))


async def test_a_client_that_leaves_has_asked_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "MOST_WAITING", 4)
    backend = Windowed()
    answer = asyncio.ensure_future(ask(backend, prompt=["a"] * 20))
    await backend.until(4)
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    backend.go.set()
    for _ in range(50):
        await asyncio.sleep(0)
    assert (len(backend.asked), len(backend.closed)) == (4, 4), "what was asked for is closed, and nothing else"


def test_a_frontend_that_stops_ends_what_it_has_not_asked_for() -> None:
    tracker = a_desk(D0)
    client, _ = opened(tracker, n=2)
    later = opened(a_desk(D0), name="later", n=2)[0].choices
    for index, choice in enumerate(later, 2):
        choice.sink, choice.index = client, index
    client.choices += later
    tracker.end_all("stopping")
    assert client.ends == dict.fromkeys(range(4), FinishReason.ERROR)
    tracker.check()
