"""GPT-NeoX and Pythia (Black et al. 2022): attention and MLP beside one another behind a norm each; a part of each head is turned."""

from typing import Any

from meshlm.architectures.config_values import boolean, words
from meshlm.architectures.family import GGUFMetadata, Layout
from meshlm.architectures.layer_norms import FUSED, layer_norm_form, layer_norm_gguf, layer_norm_spec, renaming
from meshlm.protocol.model import LayerNormSpec, ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    order = LayerNormSpec(parallel=2 if boolean(config, "use_parallel_residual") else 0)
    rotary = {"partial_rotary_factor": config["rotary_pct"], "rope_theta": config["rotary_emb_base"]}
    given = {key: value for key, value in config.items() if value is not None}
    biased = {**rotary, **given, "mlp_bias": True}
    return layer_norm_spec(biased, architecture, order, eps="layer_norm_eps", grouped=False)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    parallel = bool(metadata.get("use_parallel_residual", True))
    return layer_norm_gguf(metadata, architecture, LayerNormSpec(parallel=2 if parallel else 0), "gelu")


FAMILY = FUSED._replace(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    spec=_spec,
    keys=words("use_parallel_residual rotary_pct rotary_emb_base layer_norm_eps"),
    defaults={
        "use_parallel_residual": True,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000.0,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "attention_bias": True,
        "max_position_embeddings": 2048,
    },
    layouts={"self_attn.qkv_proj": Layout.BY_GROUP},
    rename=renaming(
        r"(?:gpt_neox\.)?layers\.",
        {
            "gpt_neox.embed_in": "model.embed_tokens",
            "gpt_neox.final_layer_norm": "model.norm",
            "embed_in": "model.embed_tokens",
            "final_layer_norm": "model.norm",
            "embed_out": "lm_head",
        },
        {
            "attention.query_key_value": "self_attn.qkv_proj",
            "attention.dense": "self_attn.o_proj",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        },
    ),
    unread=r"model\.layers\.\d+\.attention\.(rotary_emb\.inv_freq|masked_bias|bias)|model\.layers\.\d+\.attention\.rotary_emb.*",
    gguf=layer_norm_form("gptneox", _gguf, "use_parallel_residual"),
)
