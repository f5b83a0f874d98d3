"""The results of `LLM.generate`, with vLLM's names. client.py fills it."""

from dataclasses import dataclass, field

from meshlm.protocol.edges.text import PositionLogprobs


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability (natural log), its place among all tokens (1 = likeliest), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def logprobs_of(position: PositionLogprobs) -> dict[int, Logprob]:
    """Log-probabilities by token id: the sampled (or prompt) token first, then the likeliest."""
    return {t.token_id: Logprob(t.logprob, t.rank, t.text) for t in (position.token, *position.top)}


@dataclass
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    pooled: bytes = field(default=b"", repr=False)  # of a Pool task: float32
    routed_experts: None = None  # vLLM's names for what is not there
    lora_request: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One prompt's sequences."""

    request_id: str
    prompt: str | None  # None for one of token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: None = None  # vLLM's names for what is not there
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    is_last: bool | None = field(
        default=None, repr=False
    )  # of the copies of `AsyncLLM.generate`, which may lack sequences

    @property
    def finished(self) -> bool:
        return all(output.finished() for output in self.outputs) if self.is_last is None else self.is_last
