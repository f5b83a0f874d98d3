"""An attention backend: the reference in torch, under a name for --attention-backend."""

from meshlm.workers.attention.backend import Backend, TorchBackend


class TinyAttention(TorchBackend):
    name = "tiny_attention"


def make() -> Backend:
    return TinyAttention()
