"""Beam search against its plain definition, and against transformers' on a model of random weights."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.runtime.client.beam_search import Beam, BeamSearch, Candidate, num_candidates

VOCAB, END, PROMPT = 6, 0, 3


def logprobs_of(tokens: tuple[int, ...], seed: int) -> list[float]:
    """Of each token behind these; any numbers do."""
    dice = random.Random(f"{seed} {tokens}")
    return [-dice.expovariate(0.7) for _ in range(VOCAB)]


def searched(width: int, max_tokens: int, penalty: float, seed: int, *, to_the_end: bool) -> list[Beam[str]]:
    search = BeamSearch[str](width, (END,), PROMPT, max_tokens, penalty)
    while not search.is_over or (to_the_end and search.num_left and search.beams):
        found = []
        for beam in search.beams:
            each = enumerate(logprobs_of(beam.token_ids, seed))
            likeliest = sorted(each, key=lambda pair: -pair[1])[: num_candidates(width, VOCAB)]
            found.append([Candidate(token, logprob, f"{token}") for token, logprob in likeliest])
        search.take(found)
    return search.best()


def defined(width: int, max_tokens: int, penalty: float, seed: int) -> list[tuple[tuple[int, ...], float]]:
    """All beams to the last token: ended sequences without their end, and scores over the prompt's tokens too."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[tuple[int, ...], float]] = []
    for _ in range(max_tokens):
        more = []
        for tokens, total in live:
            each = sorted(enumerate(logprobs_of(tokens, seed)), key=lambda pair: -pair[1])[: 2 * width]
            ended += [(tokens, total + logprob) for token, logprob in each if token == END]
            more += [((*tokens, token), total + logprob) for token, logprob in each if token != END]
        live = sorted(more, key=lambda pair: -pair[1])[:width]
    found = sorted(ended + live, key=lambda pair: -pair[1] / (PROMPT + len(pair[0])) ** penalty)
    return found[:width]


@given(st.integers(1, 4), st.integers(1, 7), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]), st.integers(0, 10_000))
def test_it_finds_what_is_defined_and_stops_only_when_nothing_can_change(
    width: int, max_tokens: int, penalty: float, seed: int
) -> None:
    found = searched(width, max_tokens, penalty, seed, to_the_end=False)
    expected = defined(width, max_tokens, penalty, seed)
    assert [beam.token_ids for beam in found] == [tokens for tokens, _ in expected]
    assert [beam.logprob for beam in found] == pytest.approx([total for _, total in expected])
    assert found == searched(width, max_tokens, penalty, seed, to_the_end=True)
    assert all("".join(beam.details) == "".join(map(str, beam.token_ids)) for beam in found)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_beams_are_transformers(width: int) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, **shape)
    model = transformers.LlamaForCausalLM(config).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=1.5)  # else all tokens are nearly as likely
    prompt, length = [5, 6, 7], 9
    expected = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=length,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    search = BeamSearch[None](width, (), len(prompt), length)
    while not search.is_over:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *beam.token_ids] for beam in search.beams])).logits[:, -1]
        top = logits.log_softmax(-1).topk(num_candidates(width, 61))
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        search.take([[Candidate(token, logprob, None) for token, logprob in zip(*row)] for row in rows])
    found = search.best()
    assert [list(beam.token_ids) for beam in found] == expected.sequences[:, len(prompt) :].tolist()
    if width > 1:
        scores = [beam.logprob / length for beam in found]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
