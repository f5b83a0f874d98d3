"""The fake engine's pages carry what its tokens are made of: those that were moved give the right ones, wrong ones others."""

from typing import Any

import numpy as np
from fake_oracle import expected_token
from fake_steps import SPEC, VOCAB, new, plan, run
from page_copies import copied, copy_of
from tiny_models import resolved_of, spec_of

from meshlm.protocol.config import CacheConfig, KVTransferConfig, MeshConfig
from meshlm.protocol.sleeping import TAGS
from meshlm.workers.fake.engine import FakeEngine

TOKENS = list(range(20, 45))  # three blocks of 8, and one more token
SHARES = KVTransferConfig(dp_roles="prefill:1,decode:1", num_prefill_ranks=1)


def engine(kv_transfer: KVTransferConfig, spec: Any = SPEC) -> FakeEngine:
    resolved = resolved_of(spec, device="fake")
    config = MeshConfig(cache=CacheConfig(block_size=8), kv_transfer=kv_transfer, resolved=resolved)
    return FakeEngine(config, lambda *news: None)


def moved(one: FakeEngine, other: FakeEngine, here: list[int], there: list[int]) -> None:
    """Pages `here` of one engine become pages `there` of another, which reads its memory."""
    assert one.pages is not None
    assert other.pages is not None
    assert one.pages.memory is not None
    assert copied(other.pages, copy_of(one.pages.memory, there, here))[::2] == (len(here), "")


def test_tokens_follow_from_pages_that_another_engine_computed() -> None:
    one, other = engine(SHARES), engine(SHARES)
    run(one, plan([0], [0], [25], [new(0, TOKENS, [5, 2, 7, 1])]))
    moved(one, other, [5, 2, 7], [3, 9, 4])
    assert run(other, plan([0], [24], [1], [new(0, TOKENS, [3, 9, 4, 6])])) == [expected_token(TOKENS, VOCAB)]
    moved(one, other, [5, 2, 1], [3, 9, 4])
    assert run(other, plan([1], [24], [1], [new(1, TOKENS, [3, 9, 4, 6])])) != [expected_token(TOKENS, VOCAB)]


def test_pages_of_several_groups() -> None:
    """A window's pages are looked at one by one, so a wrong one shows."""
    kinds = (True, False) * 2
    spec = spec_of(
        vocab_size=VOCAB, num_hidden_layers=4, hidden_size=4, head_dim=4, max_position_embeddings=256,
        sliding_window=12, sliding_layers=kinds,
    )  # fmt: skip
    one, other = engine(SHARES, spec), engine(SHARES, spec)
    assert len(one.facts.kv_specs) == 2
    tables = [5, 15, 2, 12, 7, 17, 1, 11]  # of both groups, row by row
    run(one, plan([0], [0], [25], [new(0, TOKENS, tables)]))
    for right in (True, False):
        moved(one, other, tables[:6], [3, 33, 9, 39, 4, 34])
        if not right:
            moved(one, other, [12], [34])
        row = int(not right)
        found = run(other, plan([row], [24], [1], [new(row, TOKENS, [3, 33, 9, 39, 4, 34, 6, 36])]))
        assert (found == [expected_token(TOKENS, VOCAB)]) is right


def test_an_engine_whose_pages_stay_has_none() -> None:
    assert engine(KVTransferConfig()).pages is None
    stored = engine(KVTransferConfig(kv_offloading_size=1.0)).pages
    assert stored is not None
    assert (stored.memory, stored.page_bytes) == (None, 8 * 8), "only ranks with roles read one another's pages"


def test_pages_are_empty_after_a_sleep() -> None:
    one, other = engine(SHARES), engine(SHARES)
    run(one, plan([0], [0], [25], [new(0, TOKENS, [5, 2, 7, 1])]))
    one.be_without(TAGS)
    one.be_without(())
    buffer = np.ones((1, 64), np.uint8)
    assert one.pages is not None
    assert copied(one.pages, copy_of([buffer], [5], [0], is_load=False)).num_pages == 1
    assert not buffer.any()
    moved(one, other, [5, 2, 7], [3, 9, 4])
    assert run(other, plan([0], [24], [1], [new(0, TOKENS, [3, 9, 4, 6])])) != [expected_token(TOKENS, VOCAB)]
