"""Ranks for prompts and ranks that decode: which role a rank has, and which of them a request should go to next. Pure; used by
routing.py.

Without --dp-roles every rank does both. With it a request has two legs: a rank for prompts computes the prompt and hands the request
off with its first token; a rank that decodes loads the prompt's pages from there and goes on. A role is a preference: where no rank of
the right role takes requests, any other does all of a request, and a rank that has nothing to do takes the other role's work while the
right ranks have queues.
"""

from enum import Enum

from meshlm.protocol.edges.admit import EngineRequest
from meshlm.protocol.extras import generates

# Prompt tokens to compute up to which a request is no work for a rank for prompts. A decode step reads all weights, and a GPU computes
# some 150 to 300 tokens in the time that it takes to read them, so that so few more cost the step next to nothing; to move their pages
# costs two more messages each way and a copy, which are about as long as the step.
SHORT_PROMPT = 256
SPILL = 512.0  # decode tokens by which an idle rank must be better before it takes the other role's prompts


class RankRole(Enum):
    """The work that a rank is for, and the work that a request needs next."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> "RankRole":
        return {RankRole.PREFILL: RankRole.DECODE, RankRole.DECODE: RankRole.PREFILL}.get(self, self)


def role_of(number: int, num_prefill_ranks: int) -> RankRole:
    """The role of a rank: the first ranks are for prompts. No rank has one while `num_prefill_ranks` is 0."""
    if not num_prefill_ranks:
        return RankRole.BOTH
    return RankRole.PREFILL if number < num_prefill_ranks else RankRole.DECODE


def next_leg(work: EngineRequest, num_missing: int) -> RankRole:
    """The leg that a request which was not handed off is at, in a mesh with roles. num_missing: tokens that the rank that decodes would
    have to compute."""
    is_small = num_missing <= SHORT_PROMPT or any(extra.brings_kv for extra in work.extras)
    return RankRole.DECODE if is_small else RankRole.PREFILL


def can_be_handed_off(work: EngineRequest) -> bool:
    """Whether its prompt and its other tokens may be computed by two ranks: it has more than one token to come, can do without the
    hidden states of its prompt where it decodes, and no other mesh waits for its KV."""
    num_left = work.sampling.max_tokens - len(work.output_token_ids) // 4
    leaves_kv = any(extra.leaves_kv for extra in work.extras)
    return num_left > 1 and work.reads_prefix_cache and generates(work.extras) and not leaves_kv
