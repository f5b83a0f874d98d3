"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024): multi-head latent attention, and experts from some layer on.
DeepSeek-V3 and R1 (DeepSeek-AI 2024): V2 with experts that are scored by sigmoids and chosen with a correction bias.
The layer behind the last, which drafts further tokens (multi-token prediction), is a model of its own (drafters.py).

DeepSeek-V3.2 (DeepSeek-AI 2025): V3, of which a query attends to the tokens that a small index likes best. GLM-5 is the same, but
for the way in which its index rotates, and layers that attend to what an earlier one's index has chosen.

GLM-4.7 Flash (GLM Team 2026): V3 whose files name the layers without experts. Youtu-LLM (Tencent 2025): V2 without experts.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, number, only_these, positive, shown, words
from meshlm.architectures.dense import dense_gguf, dense_spec, one_window
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, NextN, Split, Weight
from meshlm.architectures.layers import GGUF_KEYS, checked, gguf_moe, moe_spec, with_attention, with_experts
from meshlm.architectures.weights import ExpertNames, transformer_weights
from meshlm.protocol.layers import LayerSpec, MLASpec, MoESpec
from meshlm.protocol.model import ModelSpec

KEYS = words("""
    kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim rope_interleave
    n_routed_experts num_experts num_local_experts n_shared_experts num_experts_per_tok moe_intermediate_size
    first_k_dense_replace moe_layer_freq n_group topk_group topk_method scoring_func norm_topk_prob
    routed_scaling_factor
""")
DEEPSEEK_NAMES = ExpertNames(shared="mlp.shared_experts")
MODEL = "meshlm.workers.models.deepseek:Deepseek"
_MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_NO_EXPERTS = MoESpec(num_experts=1, num_experts_per_tok=1, moe_intermediate_size=1)
DEEPSEEK_V2_DEFAULTS = (
    _MLA
    | {"n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 0, "moe_intermediate_size": 1407}
    | {"topk_method": "greedy"}
)


def deepseek_spec(config: dict[str, Any], architecture: str, moe: MoESpec) -> ModelSpec:
    """The ModelSpec that V2 and V3 have in common. moe: how experts are chosen; their sizes are read here. KeyError, ValueError."""
    for key in ("attention_bias", "mlp_bias"):
        if boolean(config, key):
            raise ValueError(f"{key} true is not supported for {architecture}")
    if config.get("rope_interleave") is False:
        raise ValueError("rope_interleave false is not supported: the weights of this family turn neighbours")
    mla = latent(config)
    nope, rotary = mla.qk_nope_head_dim, mla.qk_rope_head_dim
    spec = dense_spec({**config, "head_dim": nope + rotary}, architecture)
    if spec.rope.partial_rotary_factor != 1.0:
        raise ValueError("partial_rotary_factor is not supported: qk_rope_head_dim says what is rotated")
    if spec.num_key_value_heads != spec.num_attention_heads:
        raise ValueError("num_key_value_heads must be num_attention_heads: latent attention has no groups of heads")
    one_window(config, spec, slides=False)
    return with_routed_experts(config, with_attention(spec, num_key_value_heads=1, mla=mla), moe)


def latent(config: dict[str, Any]) -> MLASpec:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: positive(config, name) for name in names}
    sizes["q_lora_rank"] = 0 if config.get("q_lora_rank") in (None, 0) else positive(config, "q_lora_rank")
    if sizes["qk_rope_head_dim"] % 2:
        raise ValueError(f"qk_rope_head_dim is {sizes['qk_rope_head_dim']}; it must be even")
    return msgspec.convert(sizes, MLASpec)


def with_routed_experts(config: dict[str, Any], spec: ModelSpec, moe: MoESpec) -> ModelSpec:
    """The model with experts of the file's sizes in the layers that have them, chosen as `moe` says. ValueError."""
    first, every = integer(config, "first_k_dense_replace", 0), integer(config, "moe_layer_freq", 1)
    if every < 1 or first < 0:
        raise ValueError(f"moe_layer_freq is {every} and first_k_dense_replace {first}; they must be positive")
    layers = tuple(layer >= first and layer % every == 0 for layer in range(spec.num_hidden_layers))
    if config.get("n_routed_experts") is None or not any(layers):
        return spec
    sizes = moe_spec(config, "n_routed_experts")
    found = replace(
        moe,
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.num_experts_per_tok,
        moe_intermediate_size=sizes.moe_intermediate_size,
        routed_scaling_factor=number(config.get("routed_scaling_factor", 1.0), "routed_scaling_factor"),
        n_group=integer(config, "n_group", 1),
        topk_group=integer(config, "topk_group", 1),
        shared_intermediate_size=integer(config, "n_shared_experts", 0) * sizes.moe_intermediate_size,
    )
    return with_experts(spec, checked(found, "n_routed_experts"), layers)


def _deepseek_v2_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    method, scoring = config["topk_method"], config.get("scoring_func", "softmax")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method {shown(method)} is not supported; supported: greedy, group_limited_greedy")
    if scoring != "softmax":
        raise ValueError(f"scoring_func {shown(scoring)} is not supported for {architecture}; supported: softmax")
    if boolean(config, "norm_topk_prob"):
        raise ValueError("norm_topk_prob true is not supported: implementations of this family differ in what it means")
    if method == "greedy":  # groups, if any are named, play no part
        config = {**config, "n_group": 1, "topk_group": 1}
    return deepseek_spec(config, architecture, _NO_EXPERTS)


def deepseek_weights(
    spec: ModelSpec, index: Callable[[ModelSpec, MLASpec], Iterator[Weight]] | None = None
) -> Iterator[Weight]:
    """Every tensor. index: those of the index of a layer, where it has one."""

    def attention(spec: ModelSpec, layer: LayerSpec) -> Iterator[Weight]:
        assert layer.attention is not None
        mla = layer.attention.mla
        assert mla is not None
        yield from _attention(spec, mla)
        if index is not None and not mla.index_shared:
            yield from index(spec, mla)

    return transformer_weights(spec, attention=attention, experts=DEEPSEEK_NAMES)


def _attention(spec: ModelSpec, mla: MLASpec) -> Iterator[Weight]:
    heads, hidden, rank = spec.num_attention_heads, spec.hidden_size, mla.kv_lora_rank
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)

    def weight(
        name: str, gguf: str, parameter: str, *shape: int, split: Split = Split.REPLICATED, dim: int = 0
    ) -> Weight:
        return Weight(f"{name}.weight", f"{gguf}.weight", f"{parameter}.weight", shape, split, dim)

    if mla.q_lora_rank:
        yield weight("self_attn.q_a_proj", "attn_q_a", "attention.qkv", mla.q_lora_rank, hidden)
        yield weight("self_attn.q_a_layernorm", "attn_q_a_norm", "attention.q_a_norm", mla.q_lora_rank)
        yield weight(
            "self_attn.q_b_proj", "attn_q_b", "attention.q_b", queries, mla.q_lora_rank, split=Split.QUERY_HEADS
        )
    else:
        yield weight("self_attn.q_proj", "attn_q", "attention.qkv", queries, hidden, split=Split.QUERY_HEADS)
    yield weight("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", "attention.qkv", mla.down, hidden)
    yield weight("self_attn.kv_a_layernorm", "attn_kv_a_norm", "attention.kv_norm", rank)
    up = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield weight("self_attn.kv_b_proj", "attn_kv_b", "attention.kv_b", up, rank, split=Split.QUERY_HEADS)
    wide = heads * mla.v_head_dim
    yield weight("self_attn.o_proj", "attn_output", "attention.o", hidden, wide, split=Split.QUERY_HEADS, dim=1)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """V2 and V3 alike: llama.cpp has one name for both. MetadataError."""
    spec, get = dense_gguf(metadata, architecture), metadata.get
    wide, length = int(get("attention.value_length")), int(get("attention.key_length"))
    sizes = MLASpec(
        kv_lora_rank=int(get("attention.kv_lora_rank")),
        qk_rope_head_dim=int(get("rope.dimension_count")),
        qk_nope_head_dim=int(get("attention.key_length_mla", length)) - int(get("rope.dimension_count")),
        v_head_dim=int(get("attention.value_length_mla", wide)),
        q_lora_rank=int(get("attention.q_lora_rank", 0)),
    )
    if min(sizes.kv_lora_rank, sizes.qk_rope_head_dim, sizes.qk_nope_head_dim, sizes.v_head_dim) < 1:
        raise MetadataError(f"metadata {metadata.kind}: the sizes of latent attention must be positive")
    rope, stretch = spec.rope, 10 * float(get("rope.scaling.yarn_log_multiplier", 0.0))
    if rope.rope_type == "yarn":  # all of it is in the scale of scores, nothing in the rotation
        rope = replace(rope, attention_factor=1.0, mscale=stretch, mscale_all_dim=stretch)
    dim = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    spec = with_attention(replace(spec, rope=rope), head_dim=dim, num_key_value_heads=1, mla=sizes)
    return with_gguf_experts(metadata, spec)


def with_gguf_experts(metadata: GGUFMetadata, spec: ModelSpec, plain: int = 1, **changes: Any) -> ModelSpec:
    """The model with the experts of a .gguf file, in the layers behind its dense ones. plain, changes: see `gguf_experts`."""
    first = int(metadata.get("leading_dense_block_count", 0))
    layers = (layer >= first for layer in range(spec.num_hidden_layers))
    return with_experts(spec, gguf_experts(metadata, plain, **changes), layers)


def gguf_experts(metadata: GGUFMetadata, plain: int = 1, **changes: Any) -> MoESpec:
    """The experts of a .gguf file, with changes of a family. plain: how they are scored where the file does not say it.
    MetadataError."""
    get = metadata.get
    gating = int(get("expert_gating_func", plain))
    if gating not in _GATING:
        raise MetadataError(
            f"metadata {metadata.kind}.expert_gating_func is {gating}; supported: 1 (softmax), 2 (sigmoid)"
        )
    found = gguf_moe(
        metadata,
        scoring_func=_GATING[gating],
        norm_topk_prob=bool(get("expert_weights_norm", False)),
        routed_scaling_factor=float(get("expert_weights_scale", 1.0)) or 1.0,
        n_group=max(1, int(get("expert_group_count", 1))),
        topk_group=max(1, int(get("expert_group_used_count", 1))),
        group_score="top2" if gating == 2 else "max",
        correction_bias=any(name.endswith("exp_probs_b.bias") for name in metadata.shapes),
    )
    shared = int(get("expert_shared_count", 0)) * found.moe_intermediate_size
    return replace(found, **{"shared_intermediate_size": shared, **changes})


_GATING: dict[int, Literal["softmax", "sigmoid"]] = {1: "softmax", 2: "sigmoid"}
GGUF_EXPERT_KEYS = GGUF_KEYS | words("""
    leading_dense_block_count expert_shared_count expert_weights_scale expert_weights_norm expert_gating_func
    expert_group_count expert_group_used_count
""")
GGUF_MLA_KEYS = words("""
    attention.q_lora_rank attention.kv_lora_rank attention.key_length_mla attention.value_length_mla
    rope.scaling.yarn_log_multiplier
""")
DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM", model_type="deepseek_v2", spec=_deepseek_v2_spec, weights=deepseek_weights,
    keys=KEYS, defaults=DEEPSEEK_V2_DEFAULTS,
    gguf=GGUFFamily("deepseek2", _gguf, GGUF_EXPERT_KEYS | GGUF_MLA_KEYS, experts=True), model=MODEL,
)  # fmt: skip
DRAFTS = ("num_nextn_predict_layers", "num_mtp_layers")  # older files, newer files
DEEPSEEK_V3_DEFAULTS = (
    _MLA
    | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
    | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "norm_topk_prob": True}
    | {"routed_scaling_factor": 2.5}
)


def deepseek_v3_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """KeyError, ValueError."""
    only_these(config, {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}, architecture)
    moe = MoESpec(
        num_experts=1, num_experts_per_tok=1, moe_intermediate_size=1, scoring_func="sigmoid",
        norm_topk_prob=boolean(config, "norm_topk_prob"), group_score="top2", correction_bias=True,
    )  # fmt: skip
    drafts = max(integer(config, key, 0) for key in DRAFTS)
    return replace(deepseek_spec(config, architecture, moe), num_nextn_predict_layers=drafts)


DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", other_model_types=frozenset(("kimi_k2",)),
    spec=deepseek_v3_spec, weights=deepseek_weights, keys=KEYS | set(DRAFTS), defaults=DEEPSEEK_V3_DEFAULTS,
    model=MODEL, nextn=NextN("meshlm.workers.models.drafters:DeepseekNextN"),
)  # fmt: skip


def _glm_lite_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    return deepseek_v3_spec({**config, "first_k_dense_replace": _num_dense(config)}, architecture)


GLM4_MOE_LITE = DEEPSEEK_V3._replace(
    architecture="Glm4MoeLiteForCausalLM", model_type="glm4_moe_lite", other_model_types=frozenset(),
    spec=_glm_lite_spec, keys=DEEPSEEK_V3.keys | words("mlp_layer_types"),
    defaults=DEEPSEEK_V3_DEFAULTS
    | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5}
    | {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8}
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "max_position_embeddings": 202752},
)  # fmt: skip
YOUTU = Family(
    architecture="YoutuForCausalLM", model_type="youtu",
    spec=lambda config, architecture: deepseek_spec({**config, "n_routed_experts": None}, architecture, _NO_EXPERTS),
    weights=deepseek_weights,
    keys=words("kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim rope_interleave"),
    defaults=_MLA | {"tie_word_embeddings": True, "max_position_embeddings": 131072}, model=MODEL,
)  # fmt: skip
_SPARSE = {"indexed_attention", "deepseek_sparse_attention"}  # by version of transformers
_KINDS = ("full", "shared")
_LETTERS = {"F": "full", "S": "shared"}
_SIZES = ("index_topk", "index_n_heads", "index_head_dim")


def _deepseek_v32_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    kinds = config.get("layer_types")
    if kinds is not None and not set(kinds) <= _SPARSE:
        supported = ", ".join(sorted(_SPARSE))
        raise ValueError(f"layer_types {shown(kinds)} is not supported for {architecture}; supported: {supported}")
    config = {**config, "layer_types": None, "first_k_dense_replace": _num_dense(config)}
    spec = deepseek_v3_spec(config, architecture)
    assert spec.mla is not None
    sizes = {name: positive(config, name) for name in _SIZES}
    if sizes["index_head_dim"] < spec.mla.qk_rope_head_dim:
        raise ValueError(f"index_head_dim {sizes['index_head_dim']} has no room for the numbers that are rotated")
    if not spec.mla.q_lora_rank:
        raise ValueError("q_lora_rank must be given: the index reads the latent of queries")
    return with_attention(spec, mla=replace(spec.mla, **sizes))


def _glm_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = _deepseek_v32_spec(config, architecture)
    assert spec.mla is not None
    mla = replace(spec.mla, index_interleave=True)
    spec, shared = with_attention(spec, mla=mla), _shared(config, spec.num_hidden_layers)
    return with_attention(spec, shared, mla=replace(mla, index_shared=True))


def _shared(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers attend to what the last index before them has chosen. ValueError. indexer_types names the kind of each layer;
    else index_topk_pattern does, by letters; else every index_topk_freq-th layer behind the first index_skip_topk_offset - 1 has an
    index, and those have one, too."""
    kinds, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        kinds = [_LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else pattern
    if kinds is None:
        every, begin = integer(config, "index_topk_freq", 1), integer(config, "index_skip_topk_offset", 2)
        return tuple(max(layer - begin + 1, 0) % max(every, 1) > 0 for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) < layers or any(kind not in _KINDS for kind in kinds):
        raise ValueError(
            f"indexer_types (index_topk_pattern) must name the kind of each of {layers} layers, full or shared (F or S), "
            f"got {shown(kinds)}"
        )
    shared = tuple(kind == "shared" for kind in kinds[:layers])
    if shared[0]:
        raise ValueError("the first layer of indexer_types (index_topk_pattern) is shared, and no index is before it")
    return shared


def _num_dense(config: dict[str, Any]) -> int:
    """The first layers, which have an MLP. ValueError."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return integer(config, "first_k_dense_replace")
    count = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * count + ["sparse"] * (integer(config, "num_hidden_layers") - count):
        raise ValueError(
            f"mlp_layer_types must be dense for the first layers and sparse for the rest, got {shown(kinds)}"
        )
    return count


def _index(spec: ModelSpec, mla: MLASpec) -> Iterator[Weight]:
    heads, dim, hidden = mla.index_n_heads, mla.index_head_dim, spec.hidden_size
    stem, own = "self_attn.indexer", "attention.index"
    yield Weight(f"{stem}.wq_b.weight", "", f"{own}.query.weight", (heads * dim, mla.q_lora_rank))
    yield Weight(f"{stem}.wk.weight", "", f"{own}.key.weight", (dim, hidden))
    for kind in ("weight", "bias"):
        yield Weight(f"{stem}.k_norm.{kind}", "", f"{own}.key_norm.{kind}", (dim,))
    yield Weight(f"{stem}.weights_proj.weight", "", f"{own}.heads.weight", (heads, hidden), quantises=False)


_V32 = Family(
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    spec=_deepseek_v32_spec,
    weights=partial(deepseek_weights, index=_index),
    keys=KEYS | set(DRAFTS) | set(_SIZES) | words("mlp_layer_types"),
    defaults=DEEPSEEK_V3_DEFAULTS | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
    model="meshlm.workers.models.deepseek:SparseDeepseek",
    nextn=NextN("meshlm.workers.models.drafters:SparseDeepseekNextN"),
)
_GLM_KEYS = words("indexer_types index_topk_freq index_topk_pattern index_skip_topk_offset indexer_rope_interleave")
_GLM = _V32._replace(
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    spec=_glm_spec,
    keys=_V32.keys | _GLM_KEYS,
    defaults={**_V32.defaults, "index_n_heads": 32, "n_group": 1, "topk_group": 1},
)
_DEEPSEEK_V32_FAMILIES = (_V32, _GLM)
FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, YOUTU, *_DEEPSEEK_V32_FAMILIES)
