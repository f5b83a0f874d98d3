"""The layers of a whole encoder on the CPU in one call of the compiled kernels: threads start once a step, nothing is padded."""

from torch import Tensor
from torch.autograd.profiler import record_function

from meshlm.kernels.cpu.encoder import EncoderLayers, EncoderShape, EncoderWeights, takes
from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.attention.encoder import EncoderAttention
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.layers.cpu_ops import CpuOps
from meshlm.workers.layers.linear import Linear
from meshlm.workers.models.bert import Bert, BertLayer
from meshlm.workers.models.decoder import Decoder


class CpuEncoder:
    def __init__(self, layers: list[BertLayer], shape: EncoderShape) -> None:
        self._layers = EncoderLayers([_weights(layer) for layer in layers], shape)

    def run(self, model: Decoder, batch: StepInputs, caches: list[LayerCache], attention: StepAttention) -> Tensor:
        """Hidden states [t, hidden] of the last layer."""
        assert isinstance(model, Bert)
        assert isinstance(attention, EncoderAttention)
        x = model.embeddings(batch).contiguous()
        with record_function("meshlm::encoder"):  # the profiler sees operations of torch, and this is none
            return self._layers.run(x, attention.lens)


def _weights(layer: BertLayer) -> EncoderWeights:
    products = (layer.qkv, layer.o, layer.up, layer.down)
    norms = (layer.attention_norm, layer.mlp_norm)
    shifts = [tensor for norm in norms for tensor in (norm.weight, norm.bias)]
    found = [*(product.weight for product in products), *(product.bias for product in products), *shifts]
    assert all(tensor is not None for tensor in found)
    return EncoderWeights(*found)  # type: ignore[arg-type]


def fuse(model: Decoder) -> None:
    """Let a BERT that is loaded on the CPU compute this way, if its products are the kernels' and its sizes are theirs."""
    if not isinstance(model, Bert) or not isinstance(model.ops, CpuOps):
        return
    spec = model.spec
    layers = [layer for layer in model.layers if isinstance(layer, BertLayer)]
    products = [module for layer in layers for module in layer.modules() if isinstance(module, Linear)]
    shape = EncoderShape(
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_attention_heads,
        spec.head_dim,
        spec.hidden_act,
        spec.head_dim**-0.5,
        spec.rms_norm_eps,
    )
    if takes(shape) and all(product.is_fusible for product in products):
        model.executor = CpuEncoder(layers, shape)
