"""GET /server_info: what drafts tokens, by vLLM's names. The rest is rendering/test_rendering.py's, by the route."""

from typing import Any

import pytest
from parsing import RESOLVED

from meshlm.frontend.observe.information import vllm_config
from meshlm.protocol.config import MeshConfig, SpeculativeConfig

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=2)
RATES = SpeculativeConfig(
    method="suffix",
    num_speculative_tokens=2,
    rejection_sample_method="synthetic",
    synthetic_acceptance_rates=(0.5, 0.25),
)


@pytest.mark.parametrize(
    ("speculative", "said"),
    [
        (SpeculativeConfig(), None),
        (
            NGRAM,
            {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 5,
                "rejection_sample_method": "standard",
                "synthetic_acceptance_rates": None,
            },
        ),
        (
            RATES,
            {
                "method": "suffix",
                "num_speculative_tokens": 2,
                "suffix_decoding_max_tree_depth": 24,
                "suffix_decoding_max_cached_requests": 10000,
                "suffix_decoding_max_spec_factor": 1.0,
                "suffix_decoding_min_token_prob": 0.1,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [0.5, 0.25],
            },
        ),
    ],
)
def test_what_drafts_is_told_with_its_own_settings(speculative: SpeculativeConfig, said: dict[str, Any] | None) -> None:
    assert vllm_config(MeshConfig(speculative=speculative, resolved=RESOLVED))["speculative_config"] == said
