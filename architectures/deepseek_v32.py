"""DeepSeek-V3.2 (DeepSeek-AI 2025): V3, of which a query attends to the tokens that a small index likes best. GLM-5 is the same, but
for the way in which its index rotates, and layers that attend to what an earlier one's index has chosen."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, positive, shown, words
from meshlm.architectures.deepseek_v2 import KEYS, deepseek_weights
from meshlm.architectures.deepseek_v3 import DEFAULTS, DRAFTS, deepseek_v3_spec
from meshlm.architectures.family import Family, Weight
from meshlm.architectures.layers import with_attention
from meshlm.protocol.layers import MLASpec
from meshlm.protocol.model import ModelSpec

_SPARSE = {"indexed_attention", "deepseek_sparse_attention"}  # by version of transformers
_KINDS = ("full", "shared")
_LETTERS = {"F": "full", "S": "shared"}
_SIZES = ("index_topk", "index_n_heads", "index_head_dim")


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
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
    spec = _spec(config, architecture)
    assert spec.mla is not None
    mla = replace(spec.mla, index_interleave=True)
    spec, shared = with_attention(spec, mla=mla), _shared(config, spec.num_hidden_layers)
    return with_attention(spec, shared, mla=replace(mla, index_shared=True))


def _shared(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers attend to what the last index before them has chosen. ValueError.

    indexer_types names the kind of each layer; else index_topk_pattern does, by letters; else every index_topk_freq-th layer behind the
    first index_skip_topk_offset - 1 has an index, and those have one, too.
    """
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


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return deepseek_weights(spec, _index)


_V32 = Family(
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    spec=_spec,
    weights=_weights,
    keys=KEYS | set(DRAFTS) | set(_SIZES) | words("mlp_layer_types"),
    defaults=DEFAULTS | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
    compiles=False,
    model="meshlm.workers.models.deepseek_sparse:SparseDeepseek",
)

_GLM_KEYS = words("indexer_types index_topk_freq index_topk_pattern index_skip_topk_offset indexer_rope_interleave")
_GLM = _V32._replace(
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    spec=_glm_spec,
    keys=_V32.keys | _GLM_KEYS,
    defaults={**_V32.defaults, "index_n_heads": 32, "n_group": 1, "topk_group": 1},
)
FAMILIES = (_V32, _GLM)
