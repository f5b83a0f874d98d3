"""HunYuan dense (Tencent 2025): a Llama whose query and key heads are normed behind their rotation.

rope_type dynamic with an alpha stretches the base of the rotation once, whatever the length of a text.
"""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, number, shown, words
from meshlm.architectures.dense import dense_gguf, full_spec
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata
from meshlm.architectures.rope import rope_kind
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec

_WANTED: dict[str, Any] = {"use_qk_norm": True, "norm_type": "rms", "use_cla": False, "use_rotary_pos_emb": True}
_WITH_ALPHA = words("rope_type type rope_theta alpha beta_fast beta_slow factor mscale mscale_all_dim")


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key, wanted in _WANTED.items():
        if config.get(key, wanted) != wanted:
            raise ValueError(f"{key} {shown(config[key])} is not supported for {architecture}; supported: {wanted}")
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


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return replace(dense_gguf(metadata, architecture), qk_norm=True)


def _renamed(name: str) -> str:
    return name.replace(".query_layernorm.", ".q_norm.").replace(".key_layernorm.", ".k_norm.")


FAMILY = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    spec=_spec,
    weights=transformer_weights,
    keys=frozenset(_WANTED) | words("attention_head_dim cla_share_factor"),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    rename=_renamed,
    gguf=GGUFFamily("hunyuan-dense", _gguf),
    compiles=False,
    model="meshlm.workers.models.hunyuan:HunYuan",
)
