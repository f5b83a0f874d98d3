"""The log-mel spectrogram that Whisper's encoder takes (Radford et al. 2022, section 2.2).

Bands are as wide as the ear tells apart, by the scale of Slaney's Auditory Toolbox (1998): even up to 1,000 Hz, then each 6.4^(1/27)
times as high as the one before. A band is a triangle over frequencies, whose area is one.

Whisper (Radford et al. 2022): an audio encoder, and a decoder with cross-attention to its states.

    encoder:  x = gelu(conv(gelu(conv(mel)))) + positions;  layers of attention and MLP behind norms;  a norm
    decoder:  x = x + attention(norm(x));  x = x + cross attention(norm(x));  x = x + mlp(norm(x))

The encoder computes a request's audio when the request begins, alone, so that what it gives does not depend on others; each layer
of the decoder keeps its keys and values of that in a page of the request (protocol/kv.py: CrossAttention). Keys have no bias.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.kernels.silu_mul.reference import ACTIVATIONS
from meshlm.protocol.audio import HOP, SAMPLE_RATE, WINDOW
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import AudioEncoderSpec, ModelSpec
from meshlm.workers.batch import CrossCache, LayerCache
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.formats.format import ProductOps
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import LayerNorm, Linear, parameter
from meshlm.workers.layers.ops import Ops
from meshlm.workers.models.decoder import Attention, LayerClasses
from meshlm.workers.models.layer_norm import LayerNormDecoder, LayerNormLayer, UngatedMLP
from meshlm.workers.partial_sum import PartialSum

EVEN_HZ, EVEN_TO_HZ, RATIO = 200 / 3, 1000.0, math.log(6.4) / 27  # a step below, its end, the logarithm of a step above
HIGHEST_HZ = 8000.0
QUIETEST, SPAN = 1e-10, 8.0  # of powers; what lies so many powers of ten below the loudest is as quiet as that


def _of_hz(hz: float) -> float:
    return hz / EVEN_HZ if hz < EVEN_TO_HZ else EVEN_TO_HZ / EVEN_HZ + math.log(hz / EVEN_TO_HZ) / RATIO


def filters(num_bins: int) -> Tensor:
    """float32 [num_bins, 1 + WINDOW / 2]: what each frequency of a window gives to each band."""
    steps = torch.linspace(0.0, _of_hz(HIGHEST_HZ), num_bins + 2, dtype=torch.float64)
    even = EVEN_TO_HZ / EVEN_HZ
    corners = torch.where(steps < even, steps * EVEN_HZ, EVEN_TO_HZ * torch.exp(RATIO * (steps - even)))
    at = torch.linspace(0.0, SAMPLE_RATE / 2, 1 + WINDOW // 2, dtype=torch.float64)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (at - low) / (middle - low), (high - at) / (high - middle)
    return (rising.minimum(falling).clamp(min=0.0) * 2.0 / (high - low)).float()


class LogMelSpectrogram:
    def __init__(self, speech: AudioEncoderSpec, device: torch.device) -> None:
        self._speech = speech
        self._filters = filters(speech.num_mel_bins).to(device)
        self._window = torch.hann_window(WINDOW, device=device, dtype=torch.float32)

    def __call__(self, samples: Tensor) -> Tensor:
        """Samples float32 [n], n of them at most being those of the encoder's audio -> float32 [bins, 2 x max_source_positions]."""
        whole = F.pad(samples, (0, self._speech.num_samples - len(samples)))
        waves = torch.stft(whole, WINDOW, HOP, window=self._window, return_complex=True)
        loudness = (self._filters @ waves[:, :-1].abs().square()).clamp(min=QUIETEST).log10()
        return (loudness.maximum(loudness.max() - SPAN) + 4.0) / 4.0


class UnpackedLinear(Linear):
    """A product of all states of an audio clip, for which torch's own is the fastest on any device: its weight is not packed."""

    def prepare(self, ops: ProductOps) -> None:
        """See `Linear.prepare`."""

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class QueryValueBias(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.q, self.v = parameter(size), parameter(size)

    def whole(self) -> nn.Parameter:
        """The bias of query, key and value in one product."""
        return nn.Parameter(torch.cat((self.q, torch.zeros_like(self.q), self.v)), requires_grad=False)


class WhisperAttention(Attention):
    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().make(spec, layer)
        self.biases = QueryValueBias(spec.hidden_size)

    def prepare(self, ops: Ops) -> None:
        super().prepare(ops)
        self.qkv.bias = self.biases.whole()


class CrossAttentionLayer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden = spec.hidden_size
        self.q, self.kv = Linear(hidden, hidden, bias=True), UnpackedLinear(hidden, 2 * hidden, bias=False)
        self.v_bias = parameter(hidden)
        self.o = Linear(hidden, hidden, bias=True)
        self._shape, self._scale = (spec.num_attention_heads, spec.head_dim), spec.head_dim**-0.5

    def keep(self, states: Tensor, cache: CrossCache, page: int, ops: Ops) -> None:
        """The keys and values of an audio clip's states [length, hidden] go to the page."""
        keys, values = self.kv(states, ops).unflatten(1, (2, *self._shape)).unbind(1)
        cache.keys[page, : len(states)] = keys
        cache.values[page, : len(states)] = values + self.v_bias.view(self._shape)

    def forward(self, x: Tensor, cache: CrossCache, context: ForwardContext) -> Tensor:
        """x [t, hidden] -> what is added to the residual."""
        query = self.q(x, context.ops).unflatten(1, self._shape)
        found: Tensor = self.o(context.attention.attend_cross(query, cache, self._scale).flatten(1), context.ops)
        return found


class WhisperLayer(LayerNormLayer):
    def __init__(self, spec: ModelSpec, layer: int, classes: LayerClasses) -> None:
        super().__init__(spec, layer, classes)
        self.cross = CrossAttentionLayer(spec)
        self.cross_norm = LayerNorm(spec.hidden_size, spec.rms_norm_eps, bias=True)

    def forward(
        self, x: PartialSum, cache: LayerCache, context: ForwardContext, normed: Tensor | None = None
    ) -> PartialSum:
        assert isinstance(self.mlp, UngatedMLP)
        assert isinstance(self.mlp_norm, LayerNorm)
        assert cache.cross is not None
        hidden, ops = x.value, context.ops
        out = self.attention.attend(self.attention.qkv(self.attention_norm(hidden), ops), cache, context)
        hidden = hidden + self.attention.o(out, ops)
        hidden = hidden + self.cross(self.cross_norm(hidden), cache.cross, context)
        return PartialSum(hidden + ops.finish_sum(self.mlp.of_normed(self.mlp_norm(hidden), ops), hidden.dtype))


class _EncoderLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, wide: int, eps: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (LayerNorm(hidden, eps, bias=True) for _ in range(2))
        self.qkv, self.o = UnpackedLinear(hidden, 3 * hidden, bias=False), UnpackedLinear(hidden, hidden, bias=True)
        self.biases = QueryValueBias(hidden)
        self.up, self.down = UnpackedLinear(hidden, wide, bias=True), UnpackedLinear(wide, hidden, bias=True)
        self._heads = heads

    def forward(self, x: Tensor, act: str, ops: Ops) -> Tensor:
        """x [length, hidden] -> the same of the next layer."""
        lines = self.qkv(self.attention_norm(x), ops).unflatten(1, (3, self._heads, -1)).permute(1, 2, 0, 3)[:, None]
        found = F.scaled_dot_product_attention(*lines.unbind(0))
        x = x + self.o(found[0].transpose(0, 1).flatten(1), ops)
        added: Tensor = self.down(ACTIVATIONS[act](self.up(self.mlp_norm(x), ops)), ops)
        return x + added


class WhisperEncoder(nn.Module):
    def __init__(self, spec: ModelSpec, speech: AudioEncoderSpec) -> None:
        super().__init__()
        hidden, bins = spec.hidden_size, speech.num_mel_bins
        self._act, self._speech = spec.hidden_act, speech
        self.first, self.first_bias = parameter(hidden, bins, 3), parameter(hidden)
        self.second, self.second_bias = parameter(hidden, hidden, 3), parameter(hidden)
        self.positions = parameter(speech.max_source_positions, hidden)
        sizes = (hidden, speech.encoder_attention_heads, speech.encoder_ffn_dim, spec.rms_norm_eps)
        self.layers = nn.ModuleList(_EncoderLayer(*sizes) for _ in range(speech.encoder_layers))
        self.norm = LayerNorm(hidden, spec.rms_norm_eps, bias=True)

    def prepare(self, device: torch.device) -> None:
        """Computes, after loading, what is computed once."""
        self._mel = LogMelSpectrogram(self._speech, device)
        for layer in self.layers:
            assert isinstance(layer, _EncoderLayer)
            layer.qkv.bias = layer.biases.whole()

    def forward(self, samples: Tensor, ops: Ops) -> Tensor:
        """Samples float32 [n] -> states [max_source_positions, hidden]."""
        act = ACTIVATIONS[self._act]
        x = self._mel(samples).to(self.first.dtype)[None]
        x = act(F.conv1d(x, self.first, self.first_bias, padding=1))
        x = act(F.conv1d(x, self.second, self.second_bias, stride=2, padding=1))[0].t()
        x = x + self.positions
        for layer in self.layers:
            x = layer(x, self._act, ops)
        found: Tensor = self.norm(x)
        return found


class Whisper(LayerNormDecoder):
    """See `Decoder`: the decoder is what the engine knows, `encode_audio` runs the encoder."""

    classes = LayerClasses(WhisperLayer, WhisperAttention)

    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        super().__init__(spec, max_len, shard)
        assert spec.audio_encoder is not None
        self.encoder = WhisperEncoder(spec, spec.audio_encoder)
        self._never = torch.empty(0, dtype=torch.int64)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        super().prepare(device, dtype)
        self.encoder.prepare(device)
        assert self.spec.audio_encoder is not None
        self._never = torch.tensor(self.spec.audio_encoder.suppress_tokens, dtype=torch.int64, device=device)

    def encode_audio(self, samples: Tensor, pages: Sequence[int], caches: list[LayerCache]) -> None:
        states = self.encoder(samples, self.ops)
        for layer, cache in zip(self.layers, caches, strict=True):
            assert isinstance(layer, WhisperLayer)
            assert cache.cross is not None
            layer.cross.keep(states, cache.cross, pages[cache.cross.group], self.ops)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Decoder.logits`. Tokens that are never written have no chance."""
        found = super().logits(hidden, out)
        return found.index_fill_(1, self._never, -torch.inf) if len(self._never) else found
