"""What a request leaves of the vocabulary, through the whole mesh: where no token is left it ends with an error."""

import httpx
import pytest
from serving import Serving

pytestmark = [pytest.mark.mesh, pytest.mark.model]
PROMPT = "The capital of France is"


def complete(server: Serving, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, **fields}, timeout=300)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_request_that_leaves_no_token_is_told_which_field_does(smol: Serving, temperature: float) -> None:
    (paris,) = httpx.post(f"{smol.url}/tokenize", json={"prompt": " Paris"}, timeout=300).json()["tokens"]
    refused: list[dict[str, object]] = [
        {"allowed_token_ids": [paris], "bad_words": ["Paris"]},
        {"min_tokens": 3, "allowed_token_ids": [2]},
    ]
    for fields in refused:
        answer = complete(smol, temperature=temperature, logprobs=1, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids"), answer.text
        assert "no token is left" in answer.json()["error"]["message"]
    assert complete(smol, temperature=temperature).status_code == 200


def test_an_answer_in_which_tokens_run_out_ends_with_an_error(smol: Serving) -> None:
    """The first token may come, and no second one: the stream says why."""
    (paris,) = httpx.post(f"{smol.url}/tokenize", json={"prompt": " Paris"}, timeout=300).json()["tokens"]
    answer = complete(smol, temperature=0, allowed_token_ids=[paris], bad_words=["Paris Paris"], stream=True)
    *_, error, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert '" Paris"' in answer.text
    assert "no token is left" in error
    assert done == "[DONE]"


def test_a_banned_word_is_not_shown(smol: Serving) -> None:
    """Without the ban it is the first; the model takes no other tokens for it either."""
    assert complete(smol, temperature=0).json()["choices"][0]["text"].startswith(" Paris")
    for seed in range(6):
        fields = {"temperature": 0.8, "seed": seed} if seed else {"temperature": 0}
        assert " Paris" not in complete(smol, max_tokens=40, bad_words=["Paris"], **fields).json()["choices"][0]["text"]
