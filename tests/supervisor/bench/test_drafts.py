"""What `bench serve` reads of drafts in a server's /metrics, and what it says of them."""

from typing import Any

import pytest

from meshlm.supervisor.bench import drafts, results
from meshlm.supervisor.bench.results import Measured
from meshlm.supervisor.cli.terminal import Server

BEFORE = b"""# HELP meshlm:spec_decode_num_drafts_total Rows of steps that had drafted tokens.
meshlm:spec_decode_num_drafts_total{model_name="m",engine="0"} 10.0
meshlm:spec_decode_num_drafts_total{model_name="m",engine="1"} 5.0
meshlm:spec_decode_num_draft_tokens_total{model_name="m",engine="0"} 30
meshlm:spec_decode_num_accepted_tokens_total{model_name="m",engine="0"} 8.0
meshlm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",engine="0",position="0"} 6.0
meshlm:other_total{position="0"} 99.0
"""
AFTER = b"""vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 35.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 8.0e+01
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 33.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 16.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="10"} 5.0
"""
SAID: dict[str, Any] = {
    "spec_decode_acceptance_rate": 50.0,
    "spec_decode_acceptance_length": 2.25,
    "spec_decode_num_drafts": 20,
    "spec_decode_draft_tokens": 50,
    "spec_decode_accepted_tokens": 25,
    "spec_decode_per_position_acceptance_rates": [0.5, 0.5, 0.25],
}


def test_the_counts_of_all_ranks_are_summed() -> None:
    found = drafts.counts_in(BEFORE)
    assert found == {
        ("num_drafts", -1): 15,
        ("num_draft_tokens", -1): 30,
        ("num_accepted_tokens", -1): 8,
        (drafts.PER_POSITION, 0): 6,
    }


def test_what_grew_has_vllms_names() -> None:
    assert drafts.summed_up(drafts.counts_in(BEFORE), drafts.counts_in(AFTER)) == SAID


def test_without_drafts_nothing_is_said() -> None:
    after = drafts.counts_in(AFTER)
    for before, then in ((after, after), (after, drafts.counts_in(BEFORE)), ({}, {}), (None, after), (after, None)):
        assert drafts.summed_up(before, then) == {}
    assert drafts.counted(Server(False, "127.0.0.1", 1, "", "")) is None, "nobody listens there"


@pytest.mark.parametrize("drafted", [{}, SAID])
def test_the_figures_are_shown(drafted: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = results.summed_up([Measured(10.0, True, "", 5, 3, 0.5, 1.5, [0.4, 0.6], "abc")], 2.0, {})
    results.show({**found, "max_concurrency": None, "request_rate": "inf", **drafted}, (), ())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (["Acceptance", "rate", "(%):", "50.00"] in lines) == bool(drafted)
    assert (["Acceptance", "length:", "2.25"] in lines) == bool(drafted)
    assert (["Position", "2:", "25.00"] in lines) == bool(drafted)
