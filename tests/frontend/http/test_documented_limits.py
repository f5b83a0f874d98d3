"""The limits that docs/security.md and docs/from-vllm.md tell are those of the code."""

from pathlib import Path

import pytest

from meshlm.detokenizer import admission, keyed
from meshlm.detokenizer import io as detokenizer
from meshlm.frontend.grpc import listener as incoming
from meshlm.frontend.http import bodies, connection
from meshlm.frontend.openai import limits, prompts, sampling_params, schema
from meshlm.frontend.requests import budget, pacing
from meshlm.frontend.speech import routes as speech
from meshlm.protocol.config import SchedulerConfig, ServerConfig
from meshlm.protocol.wire import channels
from meshlm.runtime.mesh import newcomers

DOCS = Path(__file__).parents[3] / "docs"
SERVER = ServerConfig()


def mib(count: int) -> str:
    return f"{count >> 20} MiB"


SECURITY = [
    f"{schema.MAX_SEQUENCES:,}; {prompts.MAX_PROMPTS:,} prompts, {schema.MAX_CHOICES} choices of each",
    f"{schema.MAX_BAD_WORDS:,}; {schema.MAX_LOGPROB_IDS}; {schema.MAX_PATTERN:,} tokens; {sampling_params.MAX_XARGS_BYTES >> 10} KiB",
    f"| `stop` | {schema.MAX_STOP_STRINGS} texts of {schema.MAX_STOP_LENGTH:,} characters |",
    f"{bodies.MAX_CONTAINERS:,}; {bodies.MAX_TEXTS:,}; {bodies.MAX_VALUES:,}, of which {bodies.MAX_IN_LIST:,}",
    f"a body of more than {bodies.LARGE_BYTES >> 10} KiB is read in a thread",
    f"{connection.MAX_HEADER_BYTES >> 10} KiB, {connection.MAX_HEADER_FIELDS} fields",
    f"(`Connection: close`, HTTP/1.0), which is read so that the answer is not lost | {connection.LINGER_S:.0f} s",
    f"`logprob_token_ids` together, × sequences | {limits.MAX_LISTED_IDS:,}",
    f"together, × sequences | {mib(limits.MAX_COPIED_BYTES)}",
    f"| {mib(limits.MIN_PROMPT_BYTES)}, or {limits.BYTES_PER_TOKEN} bytes for each token",
    f"the context; {limits.MAX_PROMPT_IDS:,}, if that is more",
    f"{admission.MAX_PROMPT_LOGPROBS:,}; {limits.MAX_PROMPT_LOGPROBS:,} of all prompts",
    f"its tokens | {limits.MAX_STREAMED_ECHO:,}",
    f"tokens of all choices | {limits.MAX_KEPT_LOGPROBS:,}",
    f"`tokens` of /detokenize | {limits.MAX_DETOKENIZE_IDS:,}",
    f"`--max-audio-bytes` ({mib(SERVER.max_audio_bytes)}); `--max-audio-seconds` ({SERVER.max_audio_seconds})",
    f"`--max-concurrent-requests` ({SERVER.max_concurrent_requests:,})",
    f"with {budget.SEQUENCE_BYTES >> 10} KiB for each sequence | `--max-concurrent-bytes` ({mib(SERVER.max_concurrent_bytes)})",
    f"`--max-waiting` ({SchedulerConfig().max_waiting:,})",
    f"{pacing.MOST_WAITING} for each rank",
    f"{mib(detokenizer.MAX_WAITING_BYTES)} in each detokenizer | `detokenizer/io.py`",
    f"| {speech.DECODED_AT_ONCE} in each frontend",
    f"{budget.MAX_QUESTIONS} and {mib(budget.MAX_QUESTION_BYTES)} in each frontend",
    f"{mib(channels.MAX_REFUSED_BYTES)} towards detokenizers and coordinator",
    f"{mib(channels.MAX_QUEUED_BYTES)} elsewhere",
    f"{mib(keyed.MAX_BYTES)} in each detokenizer, `--retry-window` ({SERVER.retry_window:.0f} s)",
    f"{mib(keyed.MAX_RUNNING_BYTES)} in each detokenizer, `--retry-window` each",
    f"{incoming.MAX_FIELDS:,} fields, counted before it is decoded",
    f"a frame is at most {mib(channels.MAX_FRAME_BYTES)}",
    f"one of {newcomers.MAX_NEWCOMERS} others ({newcomers.MAX_CALLERS:,} at the coordinator",
    f"bodies that are being read, the first 64 KiB of each apart | {mib(SERVER.max_incoming_bytes)}",
    f"| request | a body | {mib(SERVER.max_body_bytes)} |",
]
FROM_VLLM = [
    f"A body has at most {bodies.MAX_CONTAINERS:,} arrays and objects, {bodies.MAX_TEXTS:,} texts and names, ",
    f"{bodies.MAX_VALUES:,} values and {bodies.MAX_FIELDS:,} fields (400)",
    f"At most {schema.MAX_BAD_WORDS:,} words, {schema.MAX_STOP_STRINGS} `stop` texts of {schema.MAX_STOP_LENGTH:,} characters; "
    f"`repetition_detection` patterns of at most {schema.MAX_PATTERN:,} tokens",
    f"{connection.MAX_HEADER_BYTES >> 10} KiB\n  and {connection.MAX_HEADER_FIELDS} fields (431)",
    f"{limits.MAX_LISTED_IDS:,} ids of `logit_bias`",
    f"{admission.MAX_PROMPT_LOGPROBS:,} entries of `prompt_logprobs` for a prompt ({limits.MAX_PROMPT_LOGPROBS:,} for all prompts",
    f"{limits.MAX_STREAMED_ECHO:,} of a prompt that a stream echoes",
]


@pytest.mark.parametrize(
    ("page", "told"), [*(("security.md", text) for text in SECURITY), *(("from-vllm.md", text) for text in FROM_VLLM)]
)
def test_a_limit_is_what_the_page_says(page: str, told: str) -> None:
    assert told in (DOCS / page).read_text("utf-8")
