"""Caches of layers that take unequal bytes of a page: none touches what is another's, in any page."""

import pytest
import torch
from tiny_models import spec_of

from meshlm.architectures.layers import with_attention
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.kv.layout import KVLayout
from meshlm.workers.kv.remote.slices import PageShape
from meshlm.workers.memory import make_caches

BLOCK, PAGES = 4, 5
KINDS = (True, True, False, True, False, False)


def model(kv_heads: int, head_dim: int) -> ModelSpec:
    spec = spec_of(
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=8,
        sliding_window=8,
        sliding_layers=KINDS,
    )
    full = [not slides for slides in KINDS]
    return with_attention(spec, full, num_key_value_heads=kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2), Shard(3, 4), Shard(0, 2, 1, 2)])
def test_pages_are_rows_of_heads_where_all_layers_have_the_same(shard: Shard) -> None:
    """What a worker of a part of the heads has of a page is what a worker of all has, cut."""
    spec = spec_of(num_hidden_layers=4, num_attention_heads=12, num_key_value_heads=4, head_dim=8, sliding_window=8)
    whole, own = (KVLayout(spec, BLOCK, 4096, torch.float32, one) for one in (WHOLE, shard))
    assert own.heads == whole.heads == (4, 32)
    assert own.page_bytes * shard.size == whole.page_bytes
    if shard.pp_size == 1:
        dice = torch.Generator().manual_seed(0)
        tensors = [
            torch.randint(256, whole.shape(PAGES), generator=dice, dtype=torch.uint8) for _ in range(whole.num_tensors)
        ]
        shape = PageShape(whole.page_bytes, *whole.heads, WHOLE)
        page = torch.cat([half[3] for tensor in tensors for half in tensor]).numpy()
        heads = range(*shard.kv_heads(4))
        cut = torch.from_numpy(shape.cut(page, heads)).view(own.num_tensors, 2, own.shape(1)[2])
        parts = [torch.zeros(own.shape(PAGES), dtype=torch.uint8) for _ in range(own.num_tensors)]
        for part, halves in zip(parts, cut):
            part[:, 3] = halves
        nothing = [(1.0, 1.0)] * 4
        for mine, all_of_it in zip(own.caches(parts, nothing), whole.caches(tensors, nothing), strict=True):
            for of_mine, of_all in ((mine.keys, all_of_it.keys), (mine.values, all_of_it.values)):
                wanted = of_all[3][:, heads.start : heads.stop].contiguous()
                assert torch.equal(of_mine[3].view(torch.uint8), wanted.view(torch.uint8))


def test_pages_of_unequal_layers_are_not_cut() -> None:
    assert KVLayout(model(2, 16), BLOCK, 4096, torch.float32).heads == (0, 0)
    assert KVLayout(model(4, 8), BLOCK, 4096, torch.float32).heads == (4, 32)


@pytest.mark.parametrize("heads", [(1, 16), (4, 16), (3, 16), (2, 16), (12, 16)])
@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2, 1, 2)], ids=["whole", "a part"])
def test_layers_of_a_page_lie_apart(heads: tuple[int, int], shard: Shard) -> None:
    """Half, twice, one and a half times, and all the bytes of layers that slide."""
    layout = KVLayout(model(*heads), BLOCK, 4096, torch.float32, shard)
    caches = make_caches(layout, PAGES, torch.device("cpu"))
    own = {place.layer: layout.specs[place.group] for place in layout.places}
    assert sorted(own) == list(range(len(caches)))
    begins = {id(tensor) for cache in caches for tensor in (cache.keys, cache.values)}
    assert len(begins) == 2 * len(caches)
    for group, share in enumerate(layout.shares):
        mine = [cache for cache in caches if cache.group == group]
        for number in range(PAGES):  # every layer of the group has one page whole, each page at a time
            for nth, cache in enumerate(mine):
                cache.keys[number * share], cache.values[number * share] = float(nth + 1), float(-nth - 1)
                assert cache.keys[number * share].is_contiguous()
            for nth, cache in enumerate(mine):
                assert set(cache.keys[number * share].unique().tolist()) == {nth + 1}
                assert set(cache.values[number * share].unique().tolist()) == {-nth - 1}
    touched = {group: extents(layout, caches, group) for group in range(len(layout.shares))}
    for pages in touched.values():
        for number, extent in pages.items():
            others = {other for found in touched.values() for page, other in found.items() if page != number}
            assert all(not extent & other for other in others), "a page of one group reaches into another page"


def extents(layout: KVLayout, caches: list[LayerCache], group: int) -> dict[int, frozenset[int]]:
    """The addresses of each page's numbers."""
    share, found = layout.shares[group], {}
    for number in range(PAGES):
        lines = [
            half[number * share] for cache in caches if cache.group == group for half in (cache.keys, cache.values)
        ]
        found[number] = frozenset(
            address for line in lines for address in range(line.data_ptr(), line.data_ptr() + 4 * line.numel(), 4)
        )
    return found


@pytest.mark.parametrize("heads", [(1, 16), (3, 16)])
def test_one_enumeration_names_all_memory(heads: tuple[int, int]) -> None:
    """What sleep gives back and what is counted are the same bytes."""
    layout = KVLayout(model(*heads), BLOCK, 4096, torch.float32)
    caches = make_caches(layout, PAGES, torch.device("cpu"))
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for cache in caches for one in cache.tensors()}
    assert sum(one.nbytes() for one in storages.values()) == PAGES * layout.page_bytes
