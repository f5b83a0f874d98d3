"""HunYuan dense (Tencent 2025): a Llama whose query and key heads are normed behind their rotation.
HunYuan-A13B (Tencent 2025): the same with experts in each layer, and an MLP beside them that every token goes to.
rope_type dynamic with an alpha stretches the base of the rotation once, whatever the length of a text.
"""

from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, number, only_these, same_in_all, words
from meshlm.architectures.dense import dense_gguf, full_spec
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError
from meshlm.architectures.layers import GGUF_KEYS, gguf_moe, moe_spec, with_experts
from meshlm.architectures.rope import rope_kind
from meshlm.architectures.weights import ExpertNames, transformer_weights
from meshlm.protocol.model import ModelSpec

_WANTED: dict[str, Any] = {"use_qk_norm": True, "norm_type": "rms", "use_cla": False, "use_rotary_pos_emb": True}
_WITH_ALPHA = words("rope_type type rope_theta alpha beta_fast beta_slow factor mscale mscale_all_dim")


def _hunyuan_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    only_these(config, _WANTED, architecture)
    return replace(full_spec({**_stretched(config), "mlp_bias": False}, architecture), qk_norm=True)


def _stretched(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the base that alpha makes of its own. ValueError."""
    given = (config.get("rope_scaling") or {}, config.get("rope_parameters") or {})
    if not all(isinstance(each, dict) for each in given):
        return config
    rope: dict[str, Any] = given[0] | given[1]
    if rope_kind(rope) != "dynamic" or not rope.get("alpha"):
        return config
    if foreign := sorted(rope.keys() - _WITH_ALPHA):
        raise ValueError(f"rope_type dynamic with alpha does not know {foreign[0]} (rope_scaling, rope_parameters)")
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    dim = integer(config, "head_dim", hidden // max(1, heads))
    if dim < 4:
        raise ValueError(f"head_dim is {dim}; rope_type dynamic with alpha needs 4 at least")
    theta = number(rope.get("rope_theta") or config.get("rope_theta") or 10000.0, "rope_theta")
    theta *= number(rope["alpha"], "alpha") ** (dim / (dim - 2))
    return {**config, "rope_scaling": None, "rope_parameters": None, "rope_theta": theta}


def _renamed(name: str) -> str:
    return name.replace(".query_layernorm.", ".q_norm.").replace(".key_layernorm.", ".k_norm.")


HUNYUAN = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    spec=_hunyuan_spec,
    weights=transformer_weights,
    keys=frozenset(_WANTED) | words("attention_head_dim cla_share_factor"),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    rename=_renamed,
    gguf=GGUFFamily("hunyuan-dense", partial(dense_gguf, qk_norm=True)),
    model="meshlm.workers.models.llama_variants:HunYuan",
)
_HUNYUAN_EXPERTS = ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp")


def _hunyuan_moe_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    chosen = same_in_all(config, "moe_topk")
    wide, shared = config["intermediate_size"], same_in_all(config, "num_shared_expert")
    if same_in_all(config, "moe_intermediate_size", wide) != wide:
        raise ValueError(f"moe_intermediate_size other than intermediate_size is not supported for {architecture}")
    moe = moe_spec({**config, "num_experts_per_tok": chosen}, wide="intermediate_size")
    moe = replace(moe, norm_topk_prob=True, shared_intermediate_size=shared * moe.moe_intermediate_size)
    return with_experts(_hunyuan_spec(config, architecture), moe)


def _hunyuan_moe_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    shared = int(metadata.get("expert_shared_feed_forward_length", 0))
    if (count := int(metadata.get("expert_shared_count", 1))) != 1:
        raise MetadataError(f"metadata {metadata.kind}.expert_shared_count is {count}; supported: 1")
    moe = gguf_moe(metadata, norm_topk_prob=True, shared_intermediate_size=shared)
    return with_experts(dense_gguf(metadata, architecture, qk_norm=True), moe)


_GGUF_EXPERT_KEYS = GGUF_KEYS | {"expert_shared_count", "expert_shared_feed_forward_length"}
HUNYUAN_MOE = HUNYUAN._replace(
    architecture="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    other_model_types=frozenset(("hunyuan",)),
    spec=_hunyuan_moe_spec,
    weights=lambda spec: transformer_weights(spec, experts=_HUNYUAN_EXPERTS),
    keys=HUNYUAN.keys | words("num_experts moe_topk num_shared_expert moe_intermediate_size"),
    defaults={**HUNYUAN.defaults, "num_experts": 1, "moe_topk": 1, "num_shared_expert": 1},
    gguf=GGUFFamily("hunyuan-moe", _hunyuan_moe_gguf, _GGUF_EXPERT_KEYS, experts=True),
    compiles=False,
)
FAMILIES = (HUNYUAN, HUNYUAN_MOE)
