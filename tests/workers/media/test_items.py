"""Items that cannot be encoded end their own request alone, by name; what is encoded is kept within a bound."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from media_cases import CASES
from media_models import LENGTH, Seeing, picture
from msgspec.structs import replace
from served_engines import Engines
from serving_images import STEP, ask, behind
from small_models import CPU, resolved

from meshlm.protocol.media import Media, MediaItem, Modality
from meshlm.protocol.media_spec import MediaSpec
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.workers.media.encoder import MediaEncoder
from meshlm.workers.media.positions import rope_shift
from meshlm.workers.media.stage import EncoderStage
from meshlm.workers.media.tensors import MediaError
from meshlm.workers.media.vectors import VectorCache


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(CASES["qwen2.5-vl"], tmp_path_factory.mktemp("seeing"))


def without_file(item: MediaItem) -> MediaItem:
    return replace(item, path=item.path + ".gone", digest=b"1" * 32)


def without_pixels(item: MediaItem) -> MediaItem:
    return replace(item, tensors=item.tensors[1:], digest=b"2" * 32)


def beyond_its_file(item: MediaItem) -> MediaItem:
    return replace(item, tensors=(replace(item.tensors[0], offset=1 << 40), *item.tensors[1:]), digest=b"3" * 32)


def of_another_shape(item: MediaItem) -> MediaItem:
    first = item.tensors[0]
    odd = replace(first, shape=(first.shape[0] // 4, first.shape[1]))
    return replace(item, tensors=(odd, *item.tensors[1:]), digest=b"4" * 32)


def of_another_grid(item: MediaItem) -> MediaItem:
    return replace(item, grid=(1, 1, 1), digest=b"5" * 32)


BAD: dict[str, tuple[Callable[[MediaItem], MediaItem], str]] = {
    "without_file": (without_file, "tensors cannot be read (FileNotFoundError)"),
    "without_pixels": (without_pixels, "the tensor pixel_values is missing"),
    "beyond_its_file": (beyond_its_file, "tensor pixel_values [64, 96] is not in its file"),
    "of_another_shape": (of_another_shape, "the model's encoder refuses it"),
    "of_another_grid": (of_another_grid, "are no grid of 1 x 1 x 1"),
}


def test_a_bad_item_ends_its_request_alone(seeing: Seeing) -> None:
    text, images = "w1 w2 <image> w5", [picture(1, 32, 32)]
    prompt, media = seeing.prompt(text, images)
    assert media is not None
    engines = Engines(seeing.folder, 40, "cpu", max_model_len=LENGTH, max_num_batched_tokens=STEP)
    try:
        bench = behind(engines)
        ask(bench, 0, prompt, media)
        for nth, (change, _) in enumerate(BAD.values(), 1):
            ask(bench, nth, prompt, Media((change(media.items[0]),)))
        ask(bench, 9, prompt, media)
        bench.finish()
    finally:
        engines.close()
    for nth, (_, said) in enumerate(BAD.values(), 1):
        assert said in bench.refused[nth]
        assert bench.error_kinds[nth] is ErrorKind.INTERNAL
    assert set(bench.refused) == set(range(1, 1 + len(BAD)))
    for handle in (0, 9):
        assert bench.tokens[handle] == seeing.logits(text, images, bench.tokens[handle][:-1]).argmax(-1).tolist()


def test_items_of_one_shape_are_encoded_at_once_and_a_bad_one_takes_none_with_it(seeing: Seeing) -> None:
    stage = EncoderStage(MediaEncoder(resolved(seeing.folder), torch.float32, CPU, 0), 64)
    items = [seeing.item(picture(seed, 32, 32)) for seed in (1, 2, 3)]
    alone = [EncoderStage(stage.encoder, 64).vectors([item])[0] for item in items]
    calls: list[int] = []
    encode = stage.encoder.encode

    def counted(modality: Modality, tensors: list[dict[str, torch.Tensor]], num_vectors: int) -> list[torch.Tensor]:
        calls.append(len(tensors))
        if any(bool((one["pixel_values"] == 0).all()) for one in tensors):
            raise MediaError("all is black")
        return encode(modality, tensors, num_vectors)

    setattr(stage.encoder, "encode", counted)  # noqa: B010 - mypy lets nobody assign a method
    for found, expected in zip(stage.vectors(items), alone, strict=True):
        assert isinstance(found, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        torch.testing.assert_close(found, expected)
    assert calls == [3]
    assert stage.num_encoded == 3
    stage.cache.clear()
    size = Path(items[0].path).stat().st_size
    black = Path(items[0].path + ".black")
    data = np.fromfile(items[0].path, np.uint8)
    data[: items[0].tensors[1].offset] = 0
    data.tofile(black)
    assert size == black.stat().st_size
    given = [items[1], replace(items[0], path=str(black), digest=b"0" * 32), items[2]]
    found_now = stage.vectors(given)
    assert [isinstance(one, MediaError) for one in found_now] == [False, True, False]


def test_the_cache_holds_what_was_used_last_within_its_bound() -> None:
    cache = VectorCache(3 * 16)
    for name in (b"a", b"b", b"c"):
        cache.put(name, torch.zeros(4))
        cache.check()
    assert cache.get(b"a") is not None
    cache.put(b"d", torch.zeros(4))
    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None
    cache.put(b"large", torch.zeros(13))
    cache.check()
    assert len(cache) == 3
    cache.put(b"two", torch.zeros(8))
    assert len(cache) == 2
    cache.clear()
    cache.check()
    assert not cache.num_bytes


def test_weights_of_the_encoder_are_read_again(seeing: Seeing) -> None:
    stage = EncoderStage(MediaEncoder(resolved(seeing.folder), torch.float32, CPU, 0), 64)
    item = seeing.item(picture(1, 32, 32))
    before = stage.vectors([item])[0]
    assert isinstance(before, torch.Tensor)
    before = before.clone()
    for weight in stage.weights():
        if weight.is_floating_point() and weight.dim() > 1:
            weight.data.mul_(2)
    stage.load(resolved(seeing.folder))
    again = stage.vectors([item])[0]
    assert isinstance(again, torch.Tensor)
    assert stage.num_encoded == 2
    torch.testing.assert_close(again, before)


def test_positions_of_images_are_transformers(seeing: Seeing) -> None:
    text, images = "w1 <image> w2 w3 <image> w4", [picture(2, 45, 19), picture(3, 14, 37)]
    ids, media = seeing.prompt(text, images)
    assert media is not None
    out = seeing.given(text, images)
    expected, delta = seeing.theirs.model.get_rope_index(
        out["input_ids"], out["mm_token_type_ids"], image_grid_thw=out["image_grid_thw"]
    )
    shift = rope_shift(media.items)
    assert (shift.of(0, len(ids)) + np.arange(len(ids))).tolist() == expected[:, 0].tolist()
    assert shift.behind == int(delta)
    assert (shift.of(7, 3) + np.arange(7, 10)).tolist() == expected[:, 0, 7:10].tolist()


def test_axes_of_frequencies() -> None:
    spec = MediaSpec(
        architecture="",
        config="",
        tower="",
        hidden_size=8,
        placeholders=((Modality.IMAGE, 3),),
        mrope_section=(4, 2, 2),
    )
    assert spec.axes(8) == (0, 0, 0, 0, 1, 1, 2, 2)
    assert replace(spec, mrope_interleaved=True).axes(8) == (0, 1, 2, 0, 1, 2, 0, 0)
    with pytest.raises(ValueError, match="not of 9 frequencies"):
        spec.axes(9)
