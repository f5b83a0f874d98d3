"""OLMoE: a layer is Llama's, its attention OLMo 2's, of which queries, keys and values may be clipped."""

from torch import Tensor

from meshlm.workers.batch import LayerCache
from meshlm.workers.distributed.communicator import Communicator
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.models.decoder import Decoder, DecoderLayer, LayerClasses
from meshlm.workers.models.post_norm import OlmoAttention


class OlmoeAttention(OlmoAttention):
    def attend_normed(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        clip = self._spec.clip_qkv
        return super().attend_normed(qkv.clamp_(-clip, clip) if clip else qkv, cache, context)


class Olmoe(Decoder):
    classes = LayerClasses(attention=OlmoeAttention)

    def join(self, comm: Communicator) -> None:
        super().join(comm)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            assert isinstance(layer.attention, OlmoeAttention)
            layer.attention.comm, layer.attention.ranks = comm, self.shard.tp_size
