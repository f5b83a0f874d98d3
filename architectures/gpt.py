"""GPT-2 (Radford et al. 2019): learned positions, and matrices that files hold with a row for each input.
StarCoder and SantaCoder (Li et al. 2023): GPT-2 with one key-value head, and a row for each output.
GPT-NeoX and Pythia (Black et al. 2022): attention and MLP beside one another behind a norm each; a part of each head is turned.
GPT-J (Wang and Komatsuzaki 2021): attention and MLP beside one another behind one norm, a part of each head turned.
OPT (Zhang et al. 2022): learned positions, of which the first token has the third.
OPT-350m has norms behind the sums, and projects its embeddings.
StableLM (Bellagente et al. 2024): layer norms around Llama's attention and MLP, a part of each head is turned.
StarCoder2 (Lozhkov et al. 2024): layer norms, biases and an MLP without a gate; all layers may slide.
"""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures import layer_norms
from meshlm.architectures.config_values import boolean, integer, only_these, pairs, refuse_quantised, shown, words
from meshlm.architectures.dense import dense_gguf, one_window, partial_factor
from meshlm.architectures.family import GGUFMetadata, Layout
from meshlm.architectures.layers import with_attention
from meshlm.architectures.weights import rotating_neighbours
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_NAMES = pairs("""
    hidden_size=n_embd num_hidden_layers=n_layer num_attention_heads=n_head max_position_embeddings=n_positions
""")
_GPT2_ORDER = LayerNormSpec(learned_positions=True)


def _gpt2_spec(config: dict[str, Any], architecture: str, *, grouped: bool = False) -> ModelSpec:
    config = layer_norms.named(config, _NAMES)
    config["intermediate_size"] = config.get("n_inner") or 4 * integer(config, "hidden_size")
    biased = {**config, "attention_bias": True, "mlp_bias": True}
    keys = {"eps": "layer_norm_epsilon", "act": "activation_function"}
    return layer_norms.layer_norm_spec(biased, architecture, _GPT2_ORDER, **keys, grouped=grouped)


def _bigcode_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    only_these(config, {"multi_query": True}, architecture)
    return _gpt2_spec({**config, "num_key_value_heads": 1}, architecture, grouped=True)


_GPT2_OUTSIDE = {"wte": "model.embed_tokens", "wpe": "model.embed_positions", "ln_f": "model.norm"}
_INSIDE = pairs("""
    ln_1=input_layernorm ln_2=post_attention_layernorm attn.c_attn=self_attn.qkv_proj attn.c_proj=self_attn.o_proj
    mlp.c_fc=mlp.up_proj mlp.c_proj=mlp.down_proj
""")
GPT2 = layer_norms.FUSED._replace(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    spec=_gpt2_spec,
    keys=words("""
        n_embd n_layer n_head n_positions n_ctx n_inner activation_function layer_norm_epsilon reorder_and_upcast_attn
        summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    """),
    defaults={"n_head": 12, "n_positions": 1024}
    | {"n_embd": 768, "n_layer": 12, "vocab_size": 50257, "activation_function": "gelu_new"}
    | {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    layouts=dict.fromkeys((stem for stem in _INSIDE.values() if stem.endswith("proj")), Layout.TRANSPOSED),
    rename=layer_norms.renaming(r"h\.", _GPT2_OUTSIDE, _INSIDE, "transformer."),
    unread=r"model\.layers\.\d+\.attn\.(masked_)?bias",
    gguf=layer_norms.layer_norm_form("gpt2", _GPT2_ORDER),
)
GPT_BIGCODE = GPT2._replace(
    architecture="GPTBigCodeForCausalLM",
    model_type="gpt_bigcode",
    spec=_bigcode_spec,
    keys=(GPT2.keys - {"reorder_and_upcast_attn"})
    | words("multi_query attention_softmax_in_fp32 scale_attention_softmax_in_fp32"),
    defaults={**GPT2.defaults, "activation_function": "gelu_pytorch_tanh"},
    layouts={},
    gguf=layer_norms.layer_norm_form("starcoder", _GPT2_ORDER),
)


def _gpt_neox_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    order = LayerNormSpec(parallel=2 if boolean(config, "use_parallel_residual") else 0)
    rotary = {"partial_rotary_factor": config["rotary_pct"], "rope_theta": config["rotary_emb_base"]}
    given = {key: value for key, value in config.items() if value is not None}
    biased = {**rotary, **given, "mlp_bias": True}
    return layer_norms.layer_norm_spec(biased, architecture, order, eps="layer_norm_eps", grouped=False)


def _gpt_neox_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    parallel = bool(metadata.get("use_parallel_residual", True))
    return layer_norms.layer_norm_gguf(metadata, architecture, LayerNormSpec(parallel=2 if parallel else 0), "gelu")


GPT_NEOX = layer_norms.FUSED._replace(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    spec=_gpt_neox_spec,
    keys=words("use_parallel_residual rotary_pct rotary_emb_base layer_norm_eps"),
    defaults={"rotary_pct": 0.25, "rotary_emb_base": 10000.0, "attention_bias": True, "max_position_embeddings": 2048}
    | {"use_parallel_residual": True, "layer_norm_eps": 1e-5, "hidden_act": "gelu"},
    layouts={"self_attn.qkv_proj": Layout.BY_GROUP},
    rename=layer_norms.renaming(
        r"(?:gpt_neox\.)?layers\.",
        pairs("""
            gpt_neox.embed_in=model.embed_tokens gpt_neox.final_layer_norm=model.norm embed_in=model.embed_tokens
            final_layer_norm=model.norm embed_out=lm_head
        """),
        pairs("""
            attention.query_key_value=self_attn.qkv_proj attention.dense=self_attn.o_proj
            mlp.dense_h_to_4h=mlp.up_proj mlp.dense_4h_to_h=mlp.down_proj
        """),
    ),
    unread=r"model\.layers\.\d+\.attention\.(rotary_emb\.inv_freq|masked_bias|bias)|model\.layers\.\d+\.attention\.rotary_emb.*",
    gguf=layer_norms.layer_norm_form("gptneox", _gpt_neox_gguf, "use_parallel_residual"),
)
_GPTJ_ORDER = LayerNormSpec(parallel=1, head_bias=True)


def _gptj_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    refuse_quantised(config, architecture, "heads rotate neighbours")
    config = layer_norms.named(config, _NAMES)
    wide = config.get("n_inner") or 4 * integer(config, "hidden_size")
    made = {**config, "intermediate_size": wide, "attention_bias": False, "mlp_bias": True}
    keys = {"eps": "layer_norm_epsilon", "act": "activation_function"}
    spec = layer_norms.layer_norm_spec(made, architecture, _GPTJ_ORDER, **keys, grouped=False)
    rotary = integer(config, "rotary_dim", spec.head_dim)
    if not 0 < rotary <= spec.head_dim:
        raise ValueError(f"rotary_dim is {rotary}; heads have {spec.head_dim} numbers")
    return replace(spec, rope=replace(spec.rope, partial_rotary_factor=partial_factor(rotary, spec.head_dim)))


_GPTJ_OUTSIDE = {"wte": "model.embed_tokens", "ln_f": "model.norm"}
GPTJ = layer_norms.LAYER_NORMS._replace(
    architecture="GPTJForCausalLM",
    model_type="gptj",
    spec=_gptj_spec,
    weights=lambda spec: rotating_neighbours(spec, layer_norms.layer_norm_weights(spec)),
    keys=words("""
        n_embd n_layer n_head n_positions n_ctx n_inner rotary rotary_dim activation_function layer_norm_epsilon
        summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    """),
    defaults={"n_positions": 2048, "rotary_dim": 64, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
    rename=layer_norms.renaming(
        r"h\.",
        _GPTJ_OUTSIDE,
        pairs("""
            ln_1=input_layernorm attn.q_proj=self_attn.q_proj attn.k_proj=self_attn.k_proj
            attn.v_proj=self_attn.v_proj attn.out_proj=self_attn.o_proj mlp.fc_in=mlp.up_proj
            mlp.fc_out=mlp.down_proj
        """),
        "transformer.",
    ),
    unread=r"model\.layers\.\d+\.attn\.(masked_)?bias",
)
_OFFSET = 2


def _opt_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key in ("enable_bias", "layer_norm_elementwise_affine"):
        if config.get(key) is False:
            raise ValueError(f"{key} false is not supported for {architecture}")
    if boolean(config, "_remove_final_layer_norm"):
        raise ValueError(f"_remove_final_layer_norm true is not supported for {architecture}")
    hidden = integer(config, "hidden_size")
    each = integer(config, "word_embed_proj_dim", hidden)
    order = LayerNormSpec(
        learned_positions=True,
        after=config.get("do_layer_norm_before") is False,
        embedding_dim=0 if each == hidden else each,
    )
    wide = {"intermediate_size": integer(config, "ffn_dim"), "attention_bias": True, "mlp_bias": True}
    biased, keys = {**config, **wide, "layer_norm_eps": 1e-5}, {"eps": "layer_norm_eps", "act": "activation_function"}
    spec = layer_norms.layer_norm_spec(biased, architecture, order, **keys, grouped=False)
    return replace(spec, position_offset=_OFFSET)


_OPT_OUTSIDE = pairs("""
    embed_tokens=model.embed_tokens embed_positions=model.embed_positions final_layer_norm=model.norm
    project_in=model.project_in project_out=model.project_out
""")
OPT = layer_norms.LAYER_NORMS._replace(
    architecture="OPTForCausalLM",
    model_type="opt",
    spec=_opt_spec,
    keys=words("""
        ffn_dim word_embed_proj_dim do_layer_norm_before activation_function enable_bias layer_norm_elementwise_affine
        _remove_final_layer_norm
    """),
    defaults={"max_position_embeddings": 2048}
    | {"ffn_dim": 3072, "activation_function": "relu", "tie_word_embeddings": True},
    rename=layer_norms.renaming(
        r"(?:model\.)?decoder\.layers\.",
        {f"{prefix}decoder.{stem}": ours for stem, ours in _OPT_OUTSIDE.items() for prefix in ("model.", "")},
        pairs("""
            self_attn.out_proj=self_attn.o_proj self_attn_layer_norm=input_layernorm
            final_layer_norm=post_attention_layernorm fc1=mlp.up_proj fc2=mlp.down_proj
        """),
    ),
)


def _stablelm_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    order = LayerNormSpec(gated=True, parallel=1 if boolean(config, "use_parallel_residual") else 0)
    biased = {**config, "attention_bias": boolean(config, "use_qkv_bias"), "mlp_bias": False}
    return replace(layer_norms.layer_norm_spec(biased, architecture, order, eps="layer_norm_eps"), output_bias=False)


def _stablelm_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    order = LayerNormSpec(gated=True, parallel=0 if "blk.0.ffn_norm.weight" in metadata.shapes else 1)
    return layer_norms.layer_norm_gguf(metadata, architecture, order, "silu")


STABLELM = layer_norms.LAYER_NORMS._replace(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    spec=_stablelm_spec,
    keys=words("layer_norm_eps use_qkv_bias use_parallel_residual"),
    defaults={"partial_rotary_factor": 0.25, "num_key_value_heads": 32, "max_position_embeddings": 4096}
    | {"layer_norm_eps": 1e-5, "hidden_act": "silu"},
    gguf=layer_norms.layer_norm_form("stablelm", _stablelm_gguf, "use_parallel_residual"),
)
_ORDER = LayerNormSpec()


def _starcoder2_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key, value in (("norm_type", "layer_norm"), ("mlp_type", "default")):
        if config.get(key) not in (None, value):
            raise ValueError(f"{key} {shown(config[key])} is not supported; supported: {value}")
    if config.get("activation_function") not in (None, config.get("hidden_act")):  # the older name
        both = f"{shown(config['activation_function'])} and hidden_act {shown(config.get('hidden_act'))}"
        raise ValueError(f"activation_function {both} differ")
    bias = boolean(config, "use_bias")
    given = {**config, "attention_bias": bias, "mlp_bias": bias}
    spec = layer_norms.layer_norm_spec(given, architecture, _ORDER, eps="norm_epsilon")
    return with_attention(spec, sliding_window=one_window(config, spec, slides=True))


def _starcoder2_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return replace(
        dense_gguf(metadata, architecture, layer_norms.GGUF_EPS),
        hidden_act="gelu_pytorch_tanh",
        mlp_bias="blk.0.ffn_up.bias" in metadata.shapes,
        norm_bias=True,
        layer_norms=_ORDER,
    )


STARCODER2 = layer_norms.LAYER_NORMS._replace(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    spec=_starcoder2_spec,
    keys=words("use_bias norm_epsilon norm_type mlp_type activation_function"),
    defaults={"num_key_value_heads": 2, "max_position_embeddings": 4096}
    | {"use_bias": True, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    rename=layer_norms.renaming(r"model\.layers\.", {}, {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
    gguf=layer_norms.layer_norm_form("starcoder2", _starcoder2_gguf),
)
FAMILIES = (GPT2, GPT_BIGCODE, GPT_NEOX, GPTJ, OPT, STABLELM, STARCODER2)
