"""Whisper (Radford et al. 2022): an encoder of audio, and a decoder with layer norms and learned positions that attends to it."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, pairs, refuse_quantised, words
from meshlm.architectures.family import Family, Serves, Weight
from meshlm.architectures.layer_norms import layer_norm_spec, layer_norm_weights, named, renaming
from meshlm.protocol.model import AudioEncoderSpec, LayerNormSpec, ModelSpec

_NAMES = pairs("""
    hidden_size=d_model num_hidden_layers=decoder_layers num_attention_heads=decoder_attention_heads
    intermediate_size=decoder_ffn_dim max_position_embeddings=max_target_positions
""")


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    refuse_quantised(config, architecture)
    heads, hidden = integer(config, "encoder_attention_heads"), integer(config, "d_model")
    if heads < 1 or hidden % heads:
        raise ValueError(f"d_model {hidden} is no multiple of encoder_attention_heads {heads}")
    sizes = {"layer_norm_eps": 1e-5, "mlp_bias": True, "num_key_value_heads": None, "head_dim": None}
    keys = {"eps": "layer_norm_eps", "act": "activation_function"}
    order = LayerNormSpec(learned_positions=True)
    spec = layer_norm_spec({**named(config, _NAMES), **sizes}, architecture, order, **keys, grouped=False)
    speech = AudioEncoderSpec(
        num_mel_bins=integer(config, "num_mel_bins"),
        encoder_layers=integer(config, "encoder_layers"),
        encoder_attention_heads=heads,
        encoder_ffn_dim=integer(config, "encoder_ffn_dim"),
        max_source_positions=integer(config, "max_source_positions"),
    )
    spec = spec.with_layers(lambda layer: replace(layer, cross_attention=speech.max_source_positions))
    return replace(spec, output_bias=True, audio_encoder=speech)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    hidden = spec.hidden_size
    yield from layer_norm_weights(spec)
    for layer in range(spec.num_hidden_layers):
        stem = f"model.layers.{layer}"
        for name, parameter, shape in (
            ("self_attn.q_proj.bias", "attention.biases.q", (hidden,)),
            ("self_attn.v_proj.bias", "attention.biases.v", (hidden,)),
            ("encoder_attn.q_proj.weight", "cross.q.weight", (hidden, hidden)),
            ("encoder_attn.q_proj.bias", "cross.q.bias", (hidden,)),
            ("encoder_attn.k_proj.weight", "cross.kv.weight", (hidden, hidden)),
            ("encoder_attn.v_proj.weight", "cross.kv.weight", (hidden, hidden)),
            ("encoder_attn.v_proj.bias", "cross.v_bias", (hidden,)),
            ("encoder_attn.out_proj.weight", "cross.o.weight", (hidden, hidden)),
            ("encoder_attn.out_proj.bias", "cross.o.bias", (hidden,)),
            ("encoder_attn_layer_norm.weight", "cross_norm.weight", (hidden,)),
            ("encoder_attn_layer_norm.bias", "cross_norm.bias", (hidden,)),
        ):
            yield Weight(f"{stem}.{name}", "", parameter, shape, layer=layer)
    yield from _encoder(hidden, spec.audio_encoder)


def _encoder(hidden: int, speech: AudioEncoderSpec | None) -> Iterator[Weight]:
    assert speech is not None
    wide = speech.encoder_ffn_dim
    found: list[tuple[str, str, tuple[int, ...]]] = [
        ("conv1.weight", "first", (hidden, speech.num_mel_bins, 3)),
        ("conv1.bias", "first_bias", (hidden,)),
        ("conv2.weight", "second", (hidden, hidden, 3)),
        ("conv2.bias", "second_bias", (hidden,)),
        ("embed_positions.weight", "positions", (speech.max_source_positions, hidden)),
        ("layer_norm.weight", "norm.weight", (hidden,)),
        ("layer_norm.bias", "norm.bias", (hidden,)),
    ]
    for layer in range(speech.encoder_layers):
        found += [
            (f"layers.{layer}.{name}", f"layers.{layer}.{parameter}", shape)
            for name, parameter, shape in (
                ("self_attn.q_proj.weight", "qkv.weight", (hidden, hidden)),
                ("self_attn.k_proj.weight", "qkv.weight", (hidden, hidden)),
                ("self_attn.v_proj.weight", "qkv.weight", (hidden, hidden)),
                ("self_attn.q_proj.bias", "biases.q", (hidden,)),
                ("self_attn.v_proj.bias", "biases.v", (hidden,)),
                ("self_attn.out_proj.weight", "o.weight", (hidden, hidden)),
                ("self_attn.out_proj.bias", "o.bias", (hidden,)),
                ("self_attn_layer_norm.weight", "attention_norm.weight", (hidden,)),
                ("self_attn_layer_norm.bias", "attention_norm.bias", (hidden,)),
                ("fc1.weight", "up.weight", (wide, hidden)),
                ("fc1.bias", "up.bias", (wide,)),
                ("fc2.weight", "down.weight", (hidden, wide)),
                ("fc2.bias", "down.bias", (hidden,)),
                ("final_layer_norm.weight", "mlp_norm.weight", (hidden,)),
                ("final_layer_norm.bias", "mlp_norm.bias", (hidden,)),
            )
        ]
    for name, parameter, shape in found:
        yield Weight(f"model.encoder.{name}", "", f"encoder.{parameter}", shape)


_OUTSIDE = pairs("""
    model.decoder.embed_tokens=model.embed_tokens model.decoder.embed_positions=model.embed_positions
    model.decoder.layer_norm=model.norm proj_out=lm_head
""")
FAMILY = Family(
    architecture="WhisperForConditionalGeneration",
    model_type="whisper",
    serves=Serves.TRANSCRIPTIONS,
    spec=_spec,
    weights=_weights,
    keys=words("""
        d_model decoder_layers decoder_attention_heads decoder_ffn_dim max_target_positions activation_function num_mel_bins
        encoder_layers encoder_attention_heads encoder_ffn_dim max_source_positions is_encoder_decoder suppress_tokens
        begin_suppress_tokens forced_decoder_ids classifier_proj_size use_weighted_layer_sum median_filter_width
        apply_spec_augment mask_time_prob mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length
        mask_feature_min_masks encoder_layerdrop decoder_layerdrop
    """),
    defaults={"decoder_layers": 4, "decoder_attention_heads": 6, "max_target_positions": 448, "encoder_layers": 4}
    | {"encoder_attention_heads": 6, "max_source_positions": 1500}
    | {"d_model": 384, "decoder_ffn_dim": 1536, "activation_function": "gelu", "num_mel_bins": 80}
    | {"encoder_ffn_dim": 1536, "tie_word_embeddings": True},
    rename=renaming(
        r"model\.decoder\.layers\.",
        _OUTSIDE,
        pairs("""
            self_attn.out_proj=self_attn.o_proj self_attn_layer_norm=input_layernorm
            final_layer_norm=post_attention_layernorm fc1=mlp.up_proj fc2=mlp.down_proj
        """),
    ),
    model="meshlm.workers.models.whisper:Whisper",
)
