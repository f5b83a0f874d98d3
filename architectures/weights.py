"""The weights of decoders: tables of names, and the tensors of layers, embeddings and heads that families have in common."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from meshlm.architectures.family import Split, Weight
from meshlm.protocol.layers import LayerSpec, MoESpec
from meshlm.protocol.model import ModelSpec

GGUF_QKV = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}
GGUF_GATE_UP = {"ffn_up": ("ffn_up.gate", "ffn_up.up")}
Norms = tuple[tuple[str, str, str], ...]
"""The weights of a layer: Hugging Face's name, llama.cpp's, and the parameter."""
PRE_NORMS: Norms = (
    ("input_layernorm", "attn_norm", "input_norm"),
    ("post_attention_layernorm", "ffn_norm", "post_norm"),
)
POST_ATTENTION_NORMS: Norms = (PRE_NORMS[0], ("post_attention_layernorm", "post_attention_norm", "post_norm"))
"""The same norms; llama.cpp has the other name for the second in some families."""
_QUERY, _KV, _WIDE = Split.QUERY_HEADS, Split.KV_HEADS, Split.INTERMEDIATE
MLP_NAMES = ("mlp", "ffn_{}", "mlp")


class ExpertNames(NamedTuple):
    """The names that a family's checkpoints give a layer's experts."""

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


NAMES = ExpertNames()


def transformer_weights(
    spec: ModelSpec,
    norms: Norms = PRE_NORMS,
    norm_plus: float = 0.0,
    *,
    attention: Callable[[ModelSpec, LayerSpec], Iterator[Weight]] | None = None,
    state: Callable[[ModelSpec], Iterator[Weight]] | None = None,
    mlp: tuple[str, str, str] = MLP_NAMES,
    experts: ExpertNames = NAMES,
) -> Iterator[Weight]:
    """Every tensor of a decoder: what each layer's record says that it has, and these norms. norm_plus: see Weight.plus, of all
    norms. attention, state: those of a layer that attends, or keeps a state, where the family's differ from Llama's. mlp: see
    `mlp_weights`."""

    def in_layer(layer: LayerSpec) -> Iterator[Weight]:
        if layer.attention is not None:
            yield from (attention or attention_weights)(spec, layer)
        if layer.state is not None and state is not None:
            yield from state(spec)
        if layer.mlp is not None:
            yield from mlp_weights(spec, layer.intermediate_size, mlp)
        if layer.experts is not None:
            yield from expert_weights(spec, layer.experts, experts)
        yield from norm_weights(spec, layer, norms, norm_plus)

    return decoder_weights(spec, in_layer, norm_plus)


def fused_gate_up(weights: Iterator[Weight]) -> Iterator[Weight]:
    """The weights of a family whose .gguf files hold gate and up in one tensor, ffn_up (GGUF_GATE_UP)."""
    for weight in weights:
        name = weight.gguf.replace(".ffn_gate.", ".ffn_up.gate.").replace(".ffn_up.weight", ".ffn_up.up.weight")
        yield weight._replace(gguf=name)


def decoder_weights(
    spec: ModelSpec, in_layer: Callable[[LayerSpec], Iterator[Weight]], norm_plus: float = 0.0
) -> Iterator[Weight]:
    """Embeddings, layers, the last norm and the head. in_layer: the tensors of a layer, by their names within it."""
    table = (spec.vocab_size, spec.hidden_size)
    yield Weight("model.embed_tokens.weight", "token_embd.weight", "embed.weight", table, Split.VOCABULARY)
    for number, layer in enumerate(spec.layers):
        for weight in in_layer(layer):
            yield weight._replace(
                name=f"model.layers.{number}.{weight.name}", gguf=f"blk.{number}.{weight.gguf}", layer=number
            )
    yield Weight("model.norm.weight", "output_norm.weight", "norm.weight", (spec.hidden_size,), plus=norm_plus)
    if not spec.tie_word_embeddings:
        yield Weight("lm_head.weight", "output.weight", "head.weight", table, Split.VOCABULARY)


def attention_weights(spec: ModelSpec, layer: LayerSpec) -> Iterator[Weight]:
    hidden, attention = spec.hidden_size, layer.attention
    assert attention is not None
    query, key = (heads * attention.head_dim for heads in (spec.num_attention_heads, attention.num_key_value_heads))
    for name, gguf, split, outputs in (
        ("q", "attn_q", _QUERY, query),
        ("k", "attn_k", _KV, key),
        ("v", "attn_v", _KV, key),
    ):
        yield from columns(
            f"self_attn.{name}_proj", gguf, "attention.qkv", (outputs, hidden), split, bias=spec.attention_bias
        )
    yield from rows("self_attn.o_proj", "attn_output", "attention.o", (hidden, query), _QUERY, bias=spec.output_bias)


def rotating_neighbours(spec: ModelSpec, weights: Iterator[Weight]) -> Iterator[Weight]:
    """The weights of a family that turns numbers 2i and 2i + 1 of a query or key head together."""
    for weight in weights:
        turned = any(f".self_attn.{name}_proj." in weight.name for name in "qk")
        yield weight._replace(neighbours=(spec.head_dim, spec.rotary_dim)) if turned else weight


def mlp_weights(spec: ModelSpec, wide: int, names: tuple[str, str, str] = MLP_NAMES) -> Iterator[Weight]:
    """A gated MLP. names: what stands before gate_proj, llama.cpp's name of "gate" and its like, and the module."""
    stem, gguf, module = names
    hidden = spec.hidden_size
    for name in ("gate", "up"):
        yield from columns(
            f"{stem}.{name}_proj", gguf.format(name), f"{module}.gate_up", (wide, hidden), _WIDE, bias=spec.mlp_bias
        )
    yield from rows(
        f"{stem}.down_proj", gguf.format("down"), f"{module}.down", (hidden, wide), _WIDE, bias=spec.mlp_bias
    )


def ungated_weights(spec: ModelSpec, wide: int, names: tuple[str, str, str] = MLP_NAMES) -> Iterator[Weight]:
    """An MLP without a gate. names: see `mlp_weights`."""
    stem, gguf, module = names
    for name, made, shape in (("up", columns, (wide, spec.hidden_size)), ("down", rows, (spec.hidden_size, wide))):
        yield from made(f"{stem}.{name}_proj", gguf.format(name), f"{module}.{name}", shape, _WIDE, bias=spec.mlp_bias)


def norm_weights(spec: ModelSpec, layer: LayerSpec, norms: Norms = PRE_NORMS, plus: float = 0.0) -> Iterator[Weight]:
    head_dims = (layer.attention.head_dim,) if spec.qk_norm and layer.attention is not None else ()
    for name in ("q", "k") if head_dims else ():
        stem, gguf = f"self_attn.{name}_norm", f"attn_{name}_norm"
        yield Weight(f"{stem}.weight", f"{gguf}.weight", f"attention.{name}_norm.weight", head_dims, plus=plus)
    for name, gguf, parameter in norms:
        yield Weight(f"{name}.weight", f"{gguf}.weight", f"{parameter}.weight", (spec.hidden_size,), plus=plus)


def columns(
    name: str, gguf: str, parameter: str, shape: tuple[int, ...], split: Split, *, bias: bool
) -> Iterator[Weight]:
    """A column-parallel product: each rank has some of its outputs."""
    yield Weight(f"{name}.weight", f"{gguf}.weight", f"{parameter}.weight", shape, split)
    if bias:
        yield Weight(f"{name}.bias", f"{gguf}.bias", f"{parameter}.bias", shape[:1], split)


def rows(name: str, gguf: str, parameter: str, shape: tuple[int, ...], split: Split, *, bias: bool) -> Iterator[Weight]:
    """A row-parallel product: each rank has some of its inputs."""
    yield Weight(f"{name}.weight", f"{gguf}.weight", f"{parameter}.weight", shape, split, dim=1)
    if bias:
        yield Weight(f"{name}.bias", f"{gguf}.bias", f"{parameter}.bias", shape[:1], Split.FIRST_RANK)


def expert_weights(spec: ModelSpec, moe: MoESpec, names: ExpertNames = NAMES) -> Iterator[Weight]:
    """A layer's router, experts, and those that every token goes to."""
    hidden = spec.hidden_size
    count, wide = moe.num_experts, moe.moe_intermediate_size
    router = Weight(f"{names.router}.weight", "ffn_gate_inp.weight", "mlp.router.weight", (count, hidden))
    yield router._replace(quantises=False)
    if moe.router_bias:
        yield Weight(f"{names.router}.bias", "ffn_gate_inp.bias", "mlp.router.bias", (count,))
    if moe.correction_bias:
        name, parameter = f"{names.router}.e_score_correction_bias", "mlp.router.correction_bias"
        yield Weight(name, "exp_probs_b.bias", parameter, (count,))
    for expert in range(count):
        stem = names.expert.format(expert)
        for name, gguf, linear, shape, dim in (
            (names.gate, "ffn_gate_exps", "gate_up", (wide, hidden), 0),
            (names.up, "ffn_up_exps", "gate_up", (wide, hidden), 0),
            (names.down, "ffn_down_exps", "down", (hidden, wide), 1),
        ):
            if gguf == "ffn_gate_exps" and not moe.gated:
                continue
            parameter = f"mlp.experts.{linear}.weight"
            yield Weight(f"{stem}.{name}.weight", f"{gguf}.weight", parameter, shape, Split.EXPERT, dim, expert=expert)
            if moe.expert_bias:
                split = Split.FIRST_RANK if linear == "down" else Split.EXPERT
                yield Weight(
                    f"{stem}.{name}.bias", f"{gguf}.bias", f"mlp.experts.{linear}.bias", shape[:1], split, expert=expert
                )
    if moe.shared_intermediate_size:
        yield from mlp_weights(spec, moe.shared_intermediate_size, (names.shared, "ffn_{}_shexp", "mlp.shared"))
    if moe.shared_gate:
        yield Weight(f"{names.shared_gate}.weight", "ffn_gate_inp_shexp.weight", "mlp.shared_gate.weight", (1, hidden))
