"""The settings of speculative decoding: tokens that are drafted cheaply, and computed together in one step of the model."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp")
"""Those that are there; plug-ins (`meshlm.drafters`) add theirs."""
MAX_SPECULATIVE_TOKENS = 15
"""Drafts of a row and step at most."""


class SpeculativeConfig(Struct, frozen=True, kw_only=True):
    """Flags, and below them what they come to. Names and defaults are vLLM's."""

    speculative_config: Annotated[
        str,
        Meta(
            description="speculative decoding, a JSON object: method (ngram, mtp ...), num_speculative_tokens and the method's own",
            extra={"short": "-sc"},
        ),
    ] = ""
    spec_method: Annotated[str, Meta(description="method of --speculative-config")] = ""
    spec_model: Annotated[str, Meta(description="model of --speculative-config")] = ""
    spec_tokens: (
        Annotated[
            int, Meta(description="num_speculative_tokens of --speculative-config: of a request and step, at most")
        ]
        | None
    ) = None
    per_request_spec_decode_metrics: Annotated[
        Literal["none", "summary", "detailed"],
        Meta(
            description="answers tell how many of their drafts were accepted (metrics.speculative_decoding); detailed: by step"
        ),
    ] = "none"

    # Set by the supervisor before any child starts (supervisor/settings/speculative.py); none of these is a flag.
    method: str = ""  # empty: no drafts
    num_speculative_tokens: int = 0  # of a row and step at most
    prompt_lookup_min: int = 5  # ngram: tokens at the text's end that must stand earlier in it, at least
    prompt_lookup_max: int = 5  # and at most
    suffix_decoding_max_tree_depth: int = 24  # suffix: tokens that are matched at most
    # answers in the tree of all requests; 0: a request has its own tree alone
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_max_spec_factor: float = 1.0  # drafts for each token that was matched, at most
    suffix_decoding_min_token_prob: float = 0.1  # of a draft, by the tree's counts, at least
    model: str = ""  # of drafts
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"
    synthetic_acceptance_rates: tuple[float, ...] = ()  # by position: how often it and all before it are accepted
