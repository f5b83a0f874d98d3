"""How many bytes requests add to a step's messages, so that a plan, its result and the rows made of it fit into frames. Pure.

Only what a request asks for can be large: lists of token ids, and log-probabilities of many tokens. Called by batching.py and core.py.
"""

from meshlm.protocol.edges.step import WorkerReady
from meshlm.protocol.extras import num_bytes
from meshlm.protocol.sampling import SamplingParams
from meshlm.scheduler_proc.request import Request

MAX_STEP_BYTES = 16 << 20  # of sampled tokens' log-probabilities; of prompts'; of rows to a detokenizer
MAX_START_BYTES = 1 << 18  # of new rows: all who decode wait until their plan is made, sent and read
POSITION_BYTES = 100  # of one position's columns, but for its likeliest tokens
TOP_BYTES = 8  # of one of those: id and log-probability
BIAS_BYTES = 14  # an id and a float in msgpack; an id alone takes five


def new_row_bytes(request: Request) -> int:
    params = request.work.sampling
    ids = len(params.logit_bias) + len(params.allowed_token_ids) + len(params.stop_token_ids)
    listed = BIAS_BYTES * (ids + len(params.eos_token_ids))
    return 500 + 8 * len(request.tokens) + listed + num_bytes(request.work.extras)


def logprob_bytes(params: SamplingParams) -> int:
    """The bytes of the log-probabilities of one sampled token."""
    return POSITION_BYTES + TOP_BYTES * params.logprobs if params.logprobs >= 0 else 0


def step_bytes(request: Request, facts: WorkerReady) -> int:
    """The bytes of its tokens' log-probabilities in one step, at most, or of its vector."""
    if not request.generates:
        return facts.pooled_bytes * sum(extra.num_vectors(request.num_prompt) for extra in request.work.extras)
    return logprob_bytes(request.work.sampling) * (1 + facts.max_drafts)


def prompt_logprob_bytes(params: SamplingParams) -> int:
    """The bytes of the log-probabilities of one prompt token."""
    return POSITION_BYTES + TOP_BYTES * params.prompt_logprobs if params.prompt_logprobs >= 0 else 0
