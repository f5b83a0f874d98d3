"""How a TinyForCausalLM computes: as Llama does. A family of its own would override layers here."""

from meshlm.workers.models.decoder import Decoder


class TinyDecoder(Decoder):
    """Embedding, layers, norm and head of a TinyForCausalLM."""
