"""What open requests may take: counted before anything is made of them."""

from contextlib import ExitStack
from typing import Any

import pytest
from answering import asking

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.requests.budget import MAX_QUESTION_BYTES, MAX_QUESTIONS, SEQUENCE_BYTES, Budget, cost_of
from meshlm.protocol.edges.text import TextPrompt
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.protocol.sampling import SamplingParams


def ask(prompt_bytes: int, num_prompts: int = 1, n: int = 1, **changes: Any) -> Any:
    return asking(False, prompts=[TextPrompt("x" * prompt_bytes)] * num_prompts, num_choices=n, **changes)


def test_a_prompt_costs_what_its_choices_make_of_it() -> None:
    assert cost_of(ask(1000)) == 2000 + SEQUENCE_BYTES
    assert cost_of(ask(1000, num_prompts=3, n=4)) == 3 * 5 * 1000 + 12 * SEQUENCE_BYTES
    biased = ask(0, n=8, sampling=SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0)))
    assert cost_of(biased) > 8 * 100 * 1000
    constrained = ask(0, n=8, extras=(Grammar(GrammarKind.REGEX, "a" * 1000),))
    assert cost_of(constrained) >= 8 * (SEQUENCE_BYTES + 2000)


def test_a_request_is_let_in_while_there_is_room() -> None:
    budget = Budget(4 * SEQUENCE_BYTES)
    with budget.open(ask(0, n=3)):
        with pytest.raises(HttpError, match="--max-concurrent-bytes") as refused, budget.open(ask(0, n=2)):
            pass
        assert refused.value.status == 503
        assert refused.value.headers(), "try again"
    with budget.open(ask(0, n=2)):
        pass
    assert budget.num_bytes == 0


def test_what_is_too_large_for_any_time_is_400() -> None:
    for wanted, field in ((ask(10, n=5), "n"), (ask(10, num_prompts=5), "prompt"), (ask(SEQUENCE_BYTES * 2), "prompt")):
        budget = Budget(4 * SEQUENCE_BYTES)
        with pytest.raises(HttpError, match="one request may take") as refused, budget.open(wanted):
            pass
        assert (refused.value.status, refused.value.param) == (400, field)


def test_questions() -> None:
    budget = Budget(1)
    with ExitStack() as several:
        for _ in range(MAX_QUESTIONS):
            several.enter_context(budget.open_question(b""))
        with pytest.raises(HttpError) as refused, budget.open_question(b""):
            pass
        assert refused.value.status == 503
    with budget.open_question(bytes(MAX_QUESTION_BYTES + 1)), pytest.raises(HttpError):
        several.enter_context(budget.open_question(TextPrompt("a")))
    with budget.open_question(TextPrompt("é")):
        assert budget.question_bytes == 2
