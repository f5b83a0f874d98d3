"""Log-probabilities in vLLM's form."""

from meshlm.protocol.edges.text import PositionLogprobs, TokenLogprob
from meshlm.supervisor.api.outputs import Logprob, logprobs_of


def test_the_token_itself_comes_first() -> None:
    token = TokenLogprob(9, -2.0, 3, " w", b" w")
    top = (TokenLogprob(3, -0.5, 1, " x", b" x"), TokenLogprob(9, -2.0, 3, " w", b" w"))
    found = logprobs_of(PositionLogprobs(token, 1, top))
    assert list(found.items()) == [(9, Logprob(-2.0, 3, " w")), (3, Logprob(-0.5, 1, " x"))]
