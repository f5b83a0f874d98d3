"""Layers are packed into groups whose pages have equal bytes, and what that saves."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import spec_of

from meshlm.protocol.kv import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    KVGroup,
    KVSpec,
    Latent,
    SlidingWindow,
    block_size_with_cross_attention,
    caches_of,
    longest_request,
    make_groups,
    pages_of,
    shares,
    spec_of_layers,
    tokens_held,
)

FULL, BLOCK = FullAttention(), 16
GEMMA_3_4B: list[KVSpec] = [FULL if layer % 6 == 5 else SlidingWindow(1024) for layer in range(34)]
GEMMA_LAYER_BYTES = 2 * 4 * 256 * 2  # of a token: keys and values, 4 heads of 256, bfloat16


def groups(specs: Sequence[KVSpec], max_model_len: int = 32768) -> tuple[KVGroup, ...]:
    return make_groups(specs, BLOCK, 100, max_model_len)


@pytest.mark.parametrize("specs", [[FULL] * 28, [SlidingWindow(4096)] * 32])
def test_a_model_of_one_kind_has_one_group(specs: list[KVSpec]) -> None:
    assert groups(specs) == (KVGroup(specs[0], tuple(range(len(specs))), BLOCK, len(specs) * BLOCK * 100),)


def test_gemma_3_4b() -> None:
    found = groups(GEMMA_3_4B)
    assert [group.spec for group in found] == [FULL] + [SlidingWindow(1024)] * 6
    assert [len(group.layers) for group in found] == [5, 5, 5, 5, 5, 5, 4]
    assert {group.page_bytes for group in found} == {5 * BLOCK * 100}
    assert sorted(layer for group in found for layer in group.layers) == list(range(34))


def test_gemma_3_4b_holds_more_than_two_and_a_half_times_the_tokens() -> None:
    memory, length = 40 << 30, 32768
    grouped = make_groups(GEMMA_3_4B, BLOCK, GEMMA_LAYER_BYTES, length)
    every = make_groups([FULL] * 34, BLOCK, GEMMA_LAYER_BYTES, length)
    assert tokens_held(every, memory, length) == memory // (34 * GEMMA_LAYER_BYTES * BLOCK) * BLOCK
    assert tokens_held(grouped, memory, length) / tokens_held(every, memory, length) > 5.5


def test_latents_have_one_group() -> None:
    """Also where the longest request is short: a line is no key and no value, whatever it keeps."""
    for length in (64, 1 << 17):
        (group,) = make_groups([Latent(512, 64)] * 27, BLOCK, 1152, length)
        assert group.spec == Latent(512, 64)
        assert group.layers == tuple(range(27))
        assert group.page_bytes == 27 * BLOCK * 1152


def test_half_and_half() -> None:
    found = groups([FULL, SlidingWindow(4096)] * 13)
    assert [group.layers for group in found] == [tuple(range(0, 26, 2)), tuple(range(1, 26, 2))]


def test_windows_that_save_next_to_nothing_are_masked_only() -> None:
    """All blocks are kept where no request outgrows the window, or where few layers slide."""
    assert [group.spec for group in groups(GEMMA_3_4B, 1024)] == [FULL]
    assert [group.spec for group in groups([FULL] * 60 + [SlidingWindow(4096)])] == [FULL]


def test_each_stage_of_a_pipeline_has_its_share_of_each_group() -> None:
    for group in groups(GEMMA_3_4B):
        first = sum(layer < 17 for layer in group.layers)
        assert 2 <= first <= 3


def test_what_layers_see_is_read_from_the_model() -> None:
    assert spec_of_layers(spec_of(num_hidden_layers=2)) == [FULL, FULL]
    assert spec_of_layers(spec_of(num_hidden_layers=2, sliding_window=8)) == [SlidingWindow(8)] * 2
    mixed = spec_of(num_hidden_layers=2, sliding_window=8, sliding_layers=(False, True))
    assert spec_of_layers(mixed) == [FULL, SlidingWindow(8)]
    chunked = spec_of(num_hidden_layers=2, attention_chunk_size=16, sliding_layers=(True, False))
    assert spec_of_layers(chunked) == [ChunkedAttention(16), FULL]


def test_layers_that_share_have_no_cache() -> None:
    kinds = (True, False, True, True, False, True)
    model = spec_of(num_hidden_layers=6, sliding_window=8, sliding_layers=kinds, num_kv_shared_layers=2)
    assert caches_of(model) == [(0, SlidingWindow(8)), (1, FULL), (2, SlidingWindow(8)), (3, SlidingWindow(8))]
    assert [layer.cache_of for layer in model.layers] == [None, None, None, None, 1, 3]
    assert model.kv_bytes_per_token_f32 * 6 == spec_of(num_hidden_layers=6).kv_bytes_per_token_f32 * 4


@pytest.mark.parametrize("chunk", [1, 5, 16, 40])
@pytest.mark.parametrize("step", [1, 7, 64])
def test_chunks_hold_no_more_than_they_say(chunk: int, step: int) -> None:
    """Between the first block that a step's first token sees and the last that the step writes."""
    spec = ChunkedAttention(chunk)
    for start in range(100):
        held = -(-(start + step) // 4) - spec.first_needed(4, start)
        assert held <= spec.num_held(4, 1000, step)
        assert spec.first_needed(4, start) <= spec.first_needed(4, start + 1)
        assert spec.first_needed(4, start) * 4 <= start // chunk * chunk


@pytest.mark.parametrize("step", [1, 7, 64])
def test_the_longest_request_is_the_longest(step: int) -> None:
    specs: list[KVSpec] = [FULL, SlidingWindow(20), SlidingWindow(20)]
    longest = longest_request(specs, 4, 50, 1000, step)
    assert pages_of(specs, 4, longest, step) <= 50 < pages_of(specs, 4, longest + 1, step)
    assert SlidingWindow(20).num_held(4, 1000, step) >= (20 + step) // 4


def test_gemma_4_31b_wastes_nothing() -> None:
    """Layers that see all take half the bytes of those that slide: ten of them have the room of five."""
    window = SlidingWindow(1024)
    specs: list[KVSpec] = [FULL if layer % 6 == 5 else window for layer in range(60)]
    sliding_bytes, full_bytes = 2 * 16 * 256 * 2, 2 * 4 * 512 * 2
    found = make_groups(specs, BLOCK, {window: sliding_bytes, FULL: full_bytes}, 1 << 17)
    assert [(group.spec, len(group.layers), group.layers_per_tensor) for group in found] == [
        (FULL, 10, 2),
        *[(window, 5, 1)] * 10,
    ]
    assert {group.page_bytes for group in found} == {5 * BLOCK * sliding_bytes} == {10 * BLOCK * full_bytes}


def test_layers_that_see_all_of_gemma_4_e2b_are_twice_as_large() -> None:
    window = SlidingWindow(512)
    specs: list[KVSpec] = [FULL if layer % 5 == 4 else window for layer in range(15)]
    found = make_groups(specs, BLOCK, {window: 1024, FULL: 2048}, 1 << 15)
    assert [(group.spec, len(group.layers)) for group in found] == [(FULL, 3), (window, 6), (window, 6)]
    assert {group.page_bytes for group in found} == {3 * BLOCK * 2048}


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8]).map(lambda heads: 64 * heads)


@given(
    st.lists(st.sampled_from([FULL, SlidingWindow(20), SlidingWindow(300)]), min_size=1, max_size=40),
    st.tuples(SIZES, SIZES, SIZES),
    st.sampled_from([16, 200, 5000]),
)
def test_pages_of_unequal_layers_have_equal_bytes(
    specs: list[KVSpec], sizes: tuple[int, int, int], longest: int
) -> None:
    """Each layer is in one group of its kind and has room in its page, and so does every other layer there."""
    kinds: list[KVSpec] = [FULL, SlidingWindow(20), SlidingWindow(300)]
    layer_bytes = {spec: size for spec, size in zip(kinds, sizes, strict=True) if spec in specs}
    found = make_groups(specs, BLOCK, layer_bytes, longest)
    unit, share = shares(layer_bytes)
    (page,) = {group.page_bytes for group in found}
    assert sorted(layer for group in found for layer in group.layers) == list(range(len(specs)))
    for group in found:
        own = {layer_bytes[specs[layer]] for layer in group.layers}
        assert group.layers_per_tensor * max(own) == unit
        tensors = -(-len(group.layers) // group.layers_per_tensor)
        assert tensors * BLOCK * unit <= page
        if set(share.values()) != {1}:
            assert {specs[layer] for layer in group.layers} == {group.spec}


@pytest.mark.parametrize(("layers", "most"), [(4, 1.16), (6, 1.06), (12, 1.06), (24, 1.06), (32, 1.09)])
def test_a_request_that_hears_takes_little_more_than_what_it_keeps(layers: int, most: float) -> None:
    """Of Whisper's sizes: 1,500 states of an audio clip and 448 tokens, in few groups whose pages have equal bytes."""
    length, context = 1500, 448
    size = block_size_with_cross_attention(16, layers, length, context)
    assert size % 16 == 0
    kinds: tuple[KVSpec, KVSpec] = (FULL, CrossAttention(length))
    specs = [spec for _ in range(layers) for spec in kinds]
    found = make_groups(specs, size, {FULL: 1, kinds[1]: -(-length // size)}, context)
    assert len({group.page_bytes for group in found}) == 1
    assert len(found) <= 5
    assert sorted(layer for group in found for layer in group.layers) == list(range(2 * layers))
    taken = pages_of([group.spec for group in found], size, context) * found[0].page_bytes
    assert layers * (length + context) <= taken <= most * layers * (length + context)


def test_blocks_are_no_shorter_than_asked_for() -> None:
    assert block_size_with_cross_attention(600, 4, 1500, 448) >= 600
