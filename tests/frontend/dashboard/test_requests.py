"""Where the time of a request went."""

from typing import Any

import pytest
from answering import asking

from meshlm.frontend.dashboard import requests
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.responses import AnswerHead, WholeResponse
from meshlm.frontend.requests.submits import build_each
from meshlm.protocol.edges.text import Finished
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.ids import FinishReason, Handle
from meshlm.runtime.client.placement import Choice


def answer_of(num_choices: int = 1, name: str = "cmpl-1") -> Any:
    answer: Any = WholeResponse(
        AnswerHead(asking(False, num_choices=num_choices, num_returned=num_choices), name, 0, "m", lambda: None)
    )
    list(build_each(answer, answer.parsed_request, lambda: Handle(1), -1, None))
    for choice in answer.choices:
        choice.opened_at = 10.0
    return answer


def begin(choice: Choice) -> None:
    choice.accepted_at, choice.first_at, choice.last_at, choice.returned_s = 10.1, 10.6, 10.6, 0.05
    choice.first = First(3, 200_000, 100_000, 1, 80_000, 20_000)
    choice.engine, choice.num_prompt_tokens = "1", 7
    choice.token_ids.append(5)


def test_the_hops_of_a_request_add_up_to_its_time() -> None:
    answer = answer_of()
    (choice,) = answer.choices
    begin(choice)
    choice.token_ids.append(6)
    choice.last_at, choice.finished = 11.0, Finished(0, FinishReason.STOP)
    noted = requests.ended(answer, "/v1/completions", 200, 11.25)
    assert noted is not None
    view = requests.view(noted)
    expected = {"encode": 0.08, "route": 0.02, "queue": 0.2, "prefill": 0.1, "links": 0.15, "return": 0.05}
    expected |= {"decode": 0.4, "write": 0.25}
    assert view.hops == pytest.approx(expected)
    assert list(view.hops) == list(expected), "in the order in which they are passed"
    assert sum(view.hops.values()) == pytest.approx(view.seconds) == pytest.approx(1.25)
    assert (view.status, view.finish_reason, view.rank, view.num_attempts) == (200, "stop", "1", 1)
    assert (view.num_prompt_tokens, view.num_cached_tokens, view.num_output_tokens) == (7, 3, 2)


def test_a_request_that_runs_says_where_it_is() -> None:
    (choice,) = answer_of().choices
    assert [view.hops for view in requests.running([choice], 10.5)] == [{"encode": 0.5}]
    choice.accepted_at = 10.1
    (view,) = requests.running([choice], 10.5)
    assert view.hops == pytest.approx({"encode": 0.1, "first token": 0.4})
    begin(choice)
    (view,) = requests.running([choice], 10.9)
    assert view.hops["decode"] == pytest.approx(0.3)
    assert view.status == 0
    assert view.seconds == pytest.approx(0.9)


def test_a_refusal_and_an_answer_without_choices() -> None:
    answer = answer_of()
    answer.error = HttpError(400, "x" * 5000)
    noted = requests.ended(answer, "/v1/completions", 400, 10.5)
    assert noted is not None
    view = requests.view(noted)
    assert (view.hops, view.status, len(view.error)) == ({"encode": 0.5}, 400, requests.MAX_ERROR)
    answer.choices[0].opened_at = 0.0
    assert requests.ended(answer, "/v1/completions", 400, 10.5) is None, "it was not asked for"


def test_the_choices_of_a_request_are_one_row_and_few_are_looked_at() -> None:
    many = [answer_of(2, f"cmpl-{number}") for number in range(1000)]
    looked_at = 0

    def choices() -> Any:
        nonlocal looked_at
        for answer in many:
            for choice in answer.choices:
                looked_at += 1
                yield choice

    views = requests.running(choices(), 10.5)
    assert [view.id.split("-")[1] for view in views] == [str(number) for number in range(50)], "the oldest"
    assert (len(views), views[0].num_choices) == (requests.MAX_RUNNING, 2)
    assert looked_at <= requests.MAX_LOOKED_AT + 1


def test_the_log_keeps_the_last_thousand_and_gives_each_once() -> None:
    log = requests.EndedLog()
    noted = requests.ended(answer_of(), "", 200, 12.0)
    assert noted is not None
    for number in range(10):
        log.add(noted._replace(name=str(number)))
    assert [view.id for view in log.take_fresh()] == [str(number) for number in range(10)]
    assert log.take_fresh() == ()
    for number in range(10, 10 + 3 * requests.MAX_ENDED):
        log.add(noted._replace(name=str(number)))
    assert len(log.take_fresh()) == len(log.all()) == requests.MAX_ENDED
    assert log.num_ended == 10 + 3 * requests.MAX_ENDED
