"""Kernels that see what few models' queries see are used where they give what plain torch gives. Here they are right, and broken."""

import pytest
from device import DEVICE, MARKS, ON_GPU, WIDE

from meshlm.kernels.attention import proof, seen_proof
from meshlm.kernels.attention.kernel import PLAIN, Extras
from meshlm.kernels.attention.proof import Variant
from meshlm.kernels.attention.seen_proof import prove_chunks, prove_heads, prove_slopes

pytestmark = MARKS
VARIANT = Variant(4, 2, 32, 16, WIDE, windowed=False, capped=False)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(proof, "REQUESTS", ((30, 20), (37, 2), (0, 9), (63, 1)))
        monkeypatch.setattr(seen_proof, "SPLITS", (4,))
        monkeypatch.setattr(seen_proof, "CHUNKS", (32,))


SLOPES = (0.5, 0.25, 0.125, 0.0625)


def test_chunks_and_slopes_are_proven() -> None:
    assert prove_chunks(VARIANT, DEVICE) == ""
    assert prove_slopes(VARIANT, SLOPES, DEVICE) == ""
    assert prove_heads(VARIANT._replace(dim=512, kv_heads=4), DEVICE) == ""


@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_a_kernel_that_sees_more_is_not_used(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(seen_proof, kernel)

    def sees_all(*given: object, **named: object) -> None:
        given = tuple(PLAIN if isinstance(one, Extras) else one for one in given)
        right(*given, **{name: PLAIN if name == "extras" else one for name, one in named.items()})

    monkeypatch.setattr(seen_proof, kernel, sees_all)
    assert prove_chunks(VARIANT, DEVICE)
    assert prove_slopes(VARIANT, SLOPES, DEVICE)


def test_a_kernel_that_cannot_be_compiled_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no such instruction\nmore")

    monkeypatch.setattr(seen_proof, "decode", fails)
    assert prove_chunks(VARIANT, DEVICE) == "RuntimeError: no such instruction"
