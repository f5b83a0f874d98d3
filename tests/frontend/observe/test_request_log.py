"""Under load a part of the requests has a log line, and those that failed have one always."""

from types import SimpleNamespace
from typing import Any

from meshlm.frontend.observe.observer import RequestLog

USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append(fields)


def answer(error: Any = None) -> Any:
    return SimpleNamespace(usage=lambda: USAGE, choices=[], request_id="cmpl-1", error=error)


def test_a_sample_says_of_how_many_it_is() -> None:
    now = [0.0]
    request_log, log = RequestLog(lambda: now[0]), Log()
    for _ in range(1000):  # a hundred a second, of which ten have lines
        request_log.ended(log, answer(), 0.1, "/v1/completions", 200, 10.0)
        now[0] += 0.01
    assert 95 <= len(log.lines) <= 111
    assert 880 <= sum(line.get("left_out", 0) for line in log.lines) <= 900
    num = len(log.lines)
    request_log.ended(log, answer(), 0.1, "/v1/completions", 504, 10.0)
    request_log.ended(log, answer(SimpleNamespace(message="m")), 0.1, "/v1/completions", 200, 10.0)
    assert len(log.lines) == num + 2


def test_few_requests_have_all_their_lines() -> None:
    now = [0.0]
    request_log, log = RequestLog(lambda: now[0]), Log()
    for _ in range(50):
        request_log.ended(log, answer(), 0.1, "/v1/completions", 200, 10.0)
        now[0] += 0.2
    assert len(log.lines) == 50
    assert not any("left_out" in line for line in log.lines)
