"""The common base of decoders with layer norms: the sizes in their files, and the weights by names that families rename theirs to."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures import dense, weights
from meshlm.architectures.config_values import number, pairs, shown
from meshlm.architectures.dense import dense_spec
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.layers import with_attention
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import LayerNormSpec, ModelSpec

QKV = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
GGUF_EPS = "attention.layer_norm_epsilon"
_ACTIVATIONS = {**dense.ACTIVATIONS, "relu": "relu", "relu2": "relu2", "gelu_python": "gelu"}


def layer_norm_spec(
    config: dict[str, Any],
    architecture: str,
    order: LayerNormSpec,
    *,
    eps: str,
    act: str = "hidden_act",
    grouped: bool = True,
) -> ModelSpec:
    """The spec of a config.json whose sizes have Llama's names. eps, act: the keys of the norms' epsilon and of the MLP's function.
    grouped: query heads of the family may share key-value heads. KeyError, ValueError."""
    function, known = config.get(act), dense.ACTIVATIONS if order.gated else _ACTIVATIONS
    if not isinstance(function, str) or function not in known:
        raise ValueError(f"{act} {shown(function)} is not supported; supported: {', '.join(known)}")
    spec = dense_spec({**config, "hidden_act": "silu"}, architecture)
    if (heads := spec.num_attention_heads) != spec.num_key_value_heads and not grouped:
        raise ValueError(
            f"num_key_value_heads {spec.num_key_value_heads} is not supported for {architecture}, only {heads}"
        )
    return replace(
        with_attention(spec, rotates=not order.learned_positions),
        hidden_act=known[function],
        rms_norm_eps=number(config[eps], eps),
        norm_bias=True,
        layer_norms=order,
    )


def layer_norm_gguf(
    metadata: GGUFMetadata, architecture: str, order: LayerNormSpec, act: str = "gelu_pytorch_tanh"
) -> ModelSpec:
    """The spec of a .gguf file. act: the function of the family's MLP, which files do not name. MetadataError."""
    spec, shapes = dense.dense_gguf(metadata, architecture, GGUF_EPS), metadata.shapes
    return replace(
        with_attention(dense.partly_rotated(spec, metadata), rotates=not order.learned_positions),
        hidden_act=act,
        attention_bias=spec.attention_bias or "blk.0.attn_qkv.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        norm_bias="output_norm.bias" in shapes,
        layer_norms=order,
    )


def layer_norm_form(
    kind: str, spec: Callable[[GGUFMetadata, str], ModelSpec] | LayerNormSpec, *keys: str, **more: Any
) -> GGUFFamily:
    """The form of .gguf files with layer norms. spec: for `layer_norm_gguf`, or the family's own. keys: those that the family honours
    beyond the norms' epsilon."""
    read = partial(layer_norm_gguf, order=spec) if isinstance(spec, LayerNormSpec) else spec
    return GGUFFamily(kind, read, frozenset((GGUF_EPS, *keys)), packed=weights.GGUF_QKV, **more)


def named(config: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The config with Llama's names for sizes. names: Llama's, and the family's. transformers takes either."""
    return {**config, **{ours: config.get(theirs, config.get(ours)) for ours, theirs in names.items()}}


def layer_norm_weights(
    spec: ModelSpec, plus: float = 0.0, experts: weights.ExpertNames = weights.NAMES
) -> Iterator[Weight]:
    """Every tensor. plus: see Weight.plus, of the weights of all norms. experts: their names, of layers that have them."""
    order = spec.layer_norms
    assert order is not None

    def in_layer(layer: LayerSpec) -> Iterator[Weight]:
        yield from weights.attention_weights(spec, layer)
        if layer.experts is not None:
            yield from weights.expert_weights(spec, layer.experts, experts)
        else:
            yield from (
                weights.mlp_weights(spec, layer.intermediate_size)
                if order.gated
                else weights.ungated_weights(spec, layer.intermediate_size)
            )
        yield from _norm(spec, "input_layernorm", "attn_norm", "attention_norm", plus)
        if order.parallel != 1:
            yield from _norm(spec, "post_attention_layernorm", "ffn_norm", "mlp_norm", plus)

    table = (spec.vocab_size, order.embedding_dim or spec.hidden_size)
    for weight in weights.decoder_weights(spec, in_layer):
        if weight.parameter in ("embed.weight", "head.weight"):
            yield weight._replace(shape=table)
        elif weight.parameter != "norm.weight":
            yield weight
    yield from _outside(spec, order, plus)


def _outside(spec: ModelSpec, order: LayerNormSpec, plus: float) -> Iterator[Weight]:
    hidden = spec.hidden_size
    if not order.after:
        yield from _norm(spec, "model.norm", "output_norm", "norm", plus)
    if order.learned_positions:
        shape = (spec.max_position_embeddings + spec.position_offset, hidden)
        yield Weight("model.embed_positions.weight", "position_embd.weight", "entry.positions", shape)
    if order.embedding_norm:
        for part in ("weight", "bias") if spec.norm_bias else ("weight",):
            yield Weight(f"model.embed_norm.{part}", f"token_embd_norm.{part}", f"entry.norm.{part}", (hidden,))
    if order.embedding_dim:
        shape = (hidden, order.embedding_dim)
        yield Weight("model.project_in.weight", "project_in.weight", "entry.project.weight", shape)
        yield Weight("model.project_out.weight", "project_out.weight", "project_out.weight", shape[::-1])
    if order.head_bias:
        yield Weight("lm_head.bias", "output.bias", "head_bias", (spec.vocab_size,))


def _norm(spec: ModelSpec, name: str, gguf: str, parameter: str, plus: float) -> Iterator[Weight]:
    order, shape = spec.layer_norms, (spec.hidden_size,)
    if order is not None and order.affine:
        yield Weight(f"{name}.weight", f"{gguf}.weight", f"{parameter}.weight", shape, plus=plus)
    if spec.norm_bias:
        yield Weight(f"{name}.bias", f"{gguf}.bias", f"{parameter}.bias", shape)


BLOOM_LAYER = pairs("""
    self_attention.query_key_value=self_attn.qkv_proj self_attention.dense=self_attn.o_proj
    mlp.dense_h_to_4h=mlp.up_proj mlp.dense_4h_to_h=mlp.down_proj
""")  # names of BLOOM's layers, which Falcon took over


def renaming(
    layer: str, outside: Mapping[str, str], inside: Mapping[str, str], wrapper: str = ""
) -> Callable[[str], str]:
    """From a file's names to those of `layer_norm_weights`. layer: a regular expression for what stands before a layer's number;
    outside, inside: stems of the family and ours. wrapper: what may stand before all names."""
    if wrapper:
        layer = f"(?:{re.escape(wrapper)})?{layer}"
        outside = {**outside, **{wrapper + stem: ours for stem, ours in outside.items()}}
    of_layer = re.compile(rf"(?:{layer})(\d+)\.(.+)\.(\w+)")

    def rename(name: str) -> str:
        if (match := of_layer.fullmatch(name)) is not None:
            return f"model.layers.{match[1]}.{inside.get(match[2], match[2])}.{match[3]}"
        stem, _, last = name.rpartition(".")
        return f"{outside[stem]}.{last}" if stem in outside else name

    return rename


LAYER_NORMS = Family(
    architecture="",
    model_type="",
    spec=partial(layer_norm_spec, order=LayerNormSpec(), eps="layer_norm_eps"),
    weights=layer_norm_weights,
    model="meshlm.workers.models.layer_norm:LayerNormDecoder",
)
"""The common fields of families of decoders with layer norms; each says the rest."""
FUSED = LAYER_NORMS._replace(packed=QKV)
"""The same, of which files hold query, key and value in one tensor."""
