"""GET /server_info and /tokenizer_info, by vLLM's names."""

import json
from typing import Any

import httpx
import pytest
from parsing import RESOLVED
from scripted import Scripted

from meshlm.frontend.observe.information import vllm_config
from meshlm.protocol.config import AdapterConfig, MeshConfig, ServerConfig, SpeculativeConfig

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


async def test_information_needs_its_flags_and_tells_no_key() -> None:
    server = Scripted(ServerConfig(server_dev_mode=True, enable_tokenizer_info_endpoint=True, api_key=("s3cret",)))
    transport = httpx.ASGITransport(app=server.app)
    headers = {"Authorization": "Bearer s3cret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        text = (await client.get("/server_info")).json()
        found = (await client.get("/server_info?config_format=json")).json()
        assert isinstance(text["meshlm_config"], str)
        assert isinstance(text["vllm_config"], str)
        theirs = found["vllm_config"]  # what TRL's client and vLLM's own tests read
        assert theirs["model_config"]["logprobs_mode"] == "raw_logprobs"
        assert theirs["model_config"]["max_logprobs"] == 20
        assert theirs["parallel_config"]["data_parallel_size"] == 1
        assert theirs["weight_transfer_config"] is None
        assert found["meshlm_config"]["server"]["api_key"] == "***"
        assert "s3cret" not in json.dumps([text, found])
        assert (await client.get("/server_info?config_format=x")).status_code == 400
        assert (await client.get("/tokenizer_info")).json()["tokenizer_class"]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=Scripted().app), base_url="http://localhost"
    ) as client:
        assert "--server-dev-mode" in (await client.get("/server_info")).text
        assert "--enable-tokenizer-info-endpoint" in (await client.get("/tokenizer_info")).text


def test_adapters_are_told_by_vllms_names() -> None:
    assert vllm_config(MeshConfig(resolved=RESOLVED))["lora_config"] is None
    config = MeshConfig(adapters=AdapterConfig(enable_lora=True, max_loras=4), resolved=RESOLVED)
    assert vllm_config(config)["lora_config"] == {
        "max_lora_rank": 16,
        "max_loras": 4,
        "fully_sharded_loras": False,
        "lora_dtype": "auto",
        "max_cpu_loras": 4,
    }
