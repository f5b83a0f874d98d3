"""Which vectors of tokens a task gives out."""

from array import array

import pytest

from meshlm.protocol.pool import Pool, PoolKind
from meshlm.runtime.similarity import of_tokens

FLAT = array("f", [0, 1, 2, 3, 4, 5, 6, 7])  # of four tokens


@pytest.mark.parametrize(
    ("pool", "ids", "begin", "end"),
    [
        (Pool(PoolKind.ALL), [5, 6, 7, 8], 0, 4),
        (Pool(PoolKind.ALL, bos_token_id=5, eos_token_id=8), [5, 6, 7, 8], 1, 3),
        (Pool(PoolKind.ALL, bos_token_id=5, eos_token_id=8), [6, 5, 8, 7], 0, 4),
        (Pool(PoolKind.ALL, bos_token_id=5), [5, 6, 7, 5], 1, 4),
        (Pool(PoolKind.ALL, step_tag_id=7), [5, 6, 7, 8], 2, 3),
    ],
)
def test_edges_and_steps(pool: Pool, ids: list[int], begin: int, end: int) -> None:
    assert of_tokens(FLAT, ids, pool) == (FLAT[2 * begin : 2 * end], end - begin)


def test_one_token_that_is_both_edges() -> None:
    pool = Pool(PoolKind.ALL, bos_token_id=5, eos_token_id=5)
    assert of_tokens(array("f", [1, 2]), [5], pool) == (array("f"), 0)
