"""Estimates of a step's operations and bytes, against sums that are made otherwise."""

import msgspec
import pytest
from small_model import SMALL
from tiny_models import spec_of

from meshlm.architectures.layers import with_attention, with_experts
from meshlm.protocol.layers import Layers, MLASpec, MoESpec
from meshlm.scheduler_proc.estimates import Estimates

LLAMA_8B = spec_of(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    dtype="bfloat16",
)


def test_a_decode_of_llama_3_8b() -> None:
    """It has 8.03e9 parameters, of which the 0.53e9 of the embedding are looked up."""
    weights = 8.03e9 - 0.53e9
    decode = Estimates(LLAMA_8B, 1).of_step([0], [1], 1)
    assert decode.flops == pytest.approx(2 * weights, rel=0.01)
    assert decode.read_bytes == pytest.approx(2 * weights, rel=0.01)
    assert decode.write_bytes == 32 * 2 * 8 * 128 * 2


def test_a_pair_of_tokens_costs_the_same_however_a_prompt_is_cut() -> None:
    estimates = Estimates(SMALL, 1)
    whole = estimates.of_step([0], [10], 0).flops
    parts = sum(estimates.of_step([start], [count], 0).flops for start, count in ((0, 4), (4, 1), (5, 5)))
    assert parts == whole


def test_the_products_of_attention() -> None:
    """Each of 2 heads of 4 numbers: a product with the key and one with the value of each of the 3 tokens that the last sees."""
    estimates = Estimates(SMALL, 1)
    with_context, without = estimates.of_step([2], [1], 0), estimates.of_step([0], [1], 0)
    assert with_context.flops - without.flops == 2 * (2 * 2 * 4 * 2)
    assert with_context.read_bytes - without.read_bytes == 2 * (2 * 1 * 4 * 4)


def test_a_window_bounds_what_is_seen() -> None:
    windowed = Estimates(with_attention(SMALL, sliding_window=4), 1)
    assert windowed.of_step([50], [1], 0).flops == windowed.of_step([4], [1], 0).flops
    whole = Estimates(SMALL, 1)
    assert windowed.of_step([0], [4], 0) == whole.of_step([0], [4], 0)
    assert windowed.of_step([0], [10], 0).flops < whole.of_step([0], [10], 0).flops


def test_experts_are_read_as_far_as_tokens_choose_them() -> None:
    moe = MoESpec(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
    estimates = Estimates(with_experts(SMALL, moe), 1)
    one, many, more = (estimates.of_step([0] * n, [1] * n, 0).read_bytes for n in (1, 4, 9))
    expert = 3 * 8 * 16 * 4
    assert many - one == pytest.approx(6 * expert + 3 * 2 * 4 * 4)
    assert more - many == pytest.approx(5 * 2 * 4 * 4)


def test_a_latent_is_read_once_and_devices_share() -> None:
    mla = MLASpec(kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
    spec = with_attention(SMALL, mla=mla)
    one, two = (Estimates(spec, devices).of_step([5], [1], 1) for devices in (1, 2))
    assert one.write_bytes == 8 * 4
    assert two.flops == one.flops / 2


def test_layers_with_larger_heads_have_more_products() -> None:
    """The heads of layers that see all are twice as large; a token at position 10 sees 10 others, and 4 in a window."""
    two = msgspec.structs.replace(LLAMA_8B, layers=Layers.alike(LLAMA_8B.layers[0], 2))
    alike = with_attention(two, (True, False), sliding_window=4)
    specs = (with_attention(alike, (False, True), head_dim=2 * alike.head_dim), alike)
    found, plain = (Estimates(spec, 1).of_step([10], [1], 0).flops for spec in specs)
    one = 2 * alike.num_attention_heads * 2 * alike.head_dim  # with each token that is seen
    weights = 2 * alike.hidden_size * alike.head_dim * 2 * (alike.num_attention_heads + alike.num_key_value_heads)
    assert found - plain == one * 11 + weights
