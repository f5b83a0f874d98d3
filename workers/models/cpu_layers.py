"""All layers of a decoder or of an encoder on the CPU in one call of the compiled kernels: threads start once a step."""

from torch import Tensor
from torch.autograd.profiler import record_function

from meshlm.kernels.cpu.encoder import EncoderLayers, EncoderShape, EncoderWeights, takes
from meshlm.kernels.cpu.layers import LayerPages, Layers, LayerWeights, Places, Shape
from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.attention.cpu_backend import CpuAttention
from meshlm.workers.attention.encoder import EncoderAttention
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.layers.cpu_ops import CpuOps
from meshlm.workers.layers.elements import MLP, Linear
from meshlm.workers.models.bert import Bert, BertLayer
from meshlm.workers.models.decoder import Decoder, DecoderLayer, LayerClasses


class CpuLayers:
    def __init__(self, model: Decoder) -> None:
        spec = model.spec
        self._hidden, self._heads = spec.hidden_size, (spec.num_attention_heads, spec.num_key_value_heads)
        layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
        self._layers = Layers(
            list(map(_layer_weights, layers)),
            [layer.attention.window for layer in layers],
            Shape(
                spec.hidden_size,
                spec.intermediate_size,
                *self._heads,
                spec.head_dim,
                spec.hidden_act,
                layers[0].attention.scale,
                spec.rms_norm_eps,
            ),
        )

    def run(self, model: Decoder, batch: StepInputs, caches: list[LayerCache], attention: StepAttention) -> Tensor:
        """Hidden states [t, hidden] after the last norm."""
        assert isinstance(attention, CpuAttention)
        assert model.embed is not None
        assert model.norm is not None
        if batch.vectors is None:
            residual = model.ops.rows(batch.input_ids, model.embed.weight, self._hidden)
        else:
            residual = batch.with_vectors(model.ops.rows(batch.known_ids, model.embed.weight, self._hidden))
        spans = attention.spans(*self._heads)
        places = Places(batch.positions, batch.slot_mapping, batch.block_tables, spans)
        own = [LayerPages(cache.keys, cache.values, cache.group) for cache in caches]
        with record_function("meshlm::layers"):  # the profiler sees operations of torch, and this is none
            x, residual = self._layers.run(residual, places, model.rope, own)
        return model.ops.add_rms_norm(x, residual, model.norm.weight, model.norm.eps)


def _layer_weights(layer: DecoderLayer) -> LayerWeights:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, MLP)
    norms = [layer.input_norm, layer.post_norm, attention.q_norm, attention.k_norm]
    products = [attention.qkv, attention.o, mlp.gate_up, mlp.down]
    weights = [None if norm is None else norm.weight for norm in norms] + [product.weight for product in products]
    return LayerWeights._make([*weights, *(product.bias for product in products)])


def fuse_decoder(model: Decoder, backend: str) -> None:
    """Let a model that is whole, loaded and on the CPU compute this way, if its products and its attention are the kernels' too."""
    products = [module for layer in model.layers for module in layer.modules() if isinstance(module, Linear)]
    fused = (
        model.classes == LayerClasses()
        and model.spec.moe is None
        and all(one.rotates for one in model.spec.attentions)
        and not model.spec.alibi_slopes
        and all(product.is_fusible for product in products)
    )
    if backend == "cpu" and isinstance(model.ops, CpuOps) and model.shard.size == 1 and fused:
        model.executor = CpuLayers(model)


class CpuEncoder:
    def __init__(self, layers: list[BertLayer], shape: EncoderShape) -> None:
        self._layers = EncoderLayers([_encoder_weights(layer) for layer in layers], shape)

    def run(self, model: Decoder, batch: StepInputs, caches: list[LayerCache], attention: StepAttention) -> Tensor:
        assert isinstance(model, Bert)
        assert isinstance(attention, EncoderAttention)
        x = model.embeddings(batch).contiguous()
        with record_function("meshlm::encoder"):  # the profiler sees operations of torch, and this is none
            return self._layers.run(x, attention.lens)


def _encoder_weights(layer: BertLayer) -> EncoderWeights:
    products = (layer.qkv, layer.o, layer.up, layer.down)
    norms = (layer.attention_norm, layer.mlp_norm)
    shifts = [tensor for norm in norms for tensor in (norm.weight, norm.bias)]
    found = [*(product.weight for product in products), *(product.bias for product in products), *shifts]
    assert all(tensor is not None for tensor in found)
    return EncoderWeights(*found)  # type: ignore[arg-type]


def fuse_encoder(model: Decoder) -> None:
    """Let a BERT that is loaded on the CPU compute this way, if its products are the kernels' and its sizes are theirs."""
    if not isinstance(model, Bert) or not isinstance(model.ops, CpuOps):
        return
    spec = model.spec
    layers = [layer for layer in model.layers if isinstance(layer, BertLayer)]
    products = [module for layer in layers for module in layer.modules() if isinstance(module, Linear)]
    shape = EncoderShape(
        spec.hidden_size, spec.intermediate_size, spec.num_attention_heads, spec.head_dim, spec.hidden_act,
        spec.head_dim**-0.5, spec.rms_norm_eps,
    )  # fmt: skip
    if takes(shape) and all(product.is_fusible for product in products):
        model.executor = CpuEncoder(layers, shape)
