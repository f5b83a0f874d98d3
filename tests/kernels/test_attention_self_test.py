"""Kernels of attention are used where their self-tests find them right: hopper.py beside prefill.py (here both are plain torch, and one
may be broken), and those that see what few models' queries see, or keep keys and values in 8 bits, beside plain torch."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device import DEVICE, MARKS, ON_GPU, WIDE, needs_fp8
from paged import make, step_of
from torch import Tensor

from meshlm.kernels.attention import decode as decodes
from meshlm.kernels.attention import hopper, self_test, tiles
from meshlm.kernels.attention import prefill as checked
from meshlm.kernels.attention.kernel import PLAIN, Columns, Extras
from meshlm.kernels.attention.reference import attention
from meshlm.kernels.attention.self_test import (
    CacheShape,
    self_test_cache,
    self_test_chunks,
    self_test_heads,
    self_test_hopper,
    self_test_slopes,
)
from meshlm.kernels.attention.tiles import Variant, verified
from meshlm.kernels.rope_cache import kernel as rope

pytestmark = MARKS
VARIANT = Variant(4, 2, 32, 16, torch.float16, windowed=True, capped=False)
Broken = Callable[[Tensor, Columns], None]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    before = set(verified)
    verified.clear()
    yield
    verified.clear()
    verified.update(before)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`breaks`: what is wrong with hopper.py's outputs."""
    state = SimpleNamespace(breaks=lambda out, at: None, monkeypatch=monkeypatch)

    def run(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        at: Columns,
        scale: float,
        out: Tensor,
        *,
        extras: Extras,
        qkv: Tensor,
        **_: object,
    ) -> None:
        """Reads the step's own tokens from the projection, and no page that it must not."""
        heads, kv_heads, dim = query.shape[1], keys.shape[2], keys.shape[3]
        own = qkv.view(len(qkv), heads + 2 * kv_heads, dim)[:, heads:]
        keys, values = torch.nan_to_num(keys), torch.nan_to_num(values)
        begin = 0
        for row, start, end in zip(at.rows.tolist(), at.starts.tolist(), at.ends.tolist(), strict=True):
            place = torch.arange(start, start + end - begin)
            where = at.blocks[row, place // 16].long(), place % 16
            keys[where], values[where] = own[begin:end, :kv_heads], own[begin:end, kv_heads:]
            begin = end
        out.copy_(attention(query, keys, values, at, scale, extras))

    def other(*arguments: object, **options: object) -> None:
        run(*arguments, **options)  # type: ignore[arg-type]
        state.breaks(arguments[5], arguments[3])

    monkeypatch.setattr(checked, "prefill", run)
    monkeypatch.setattr(hopper, "prefill", other)
    monkeypatch.setattr(self_test, "REQUESTS", ((30, 20), (37, 2), (0, 9), (70, 13)))
    monkeypatch.setattr(self_test, "WINDOWS", (5, 20))
    return state


@pytest.mark.usefixtures("kernels")
def test_what_gives_the_same_is_verified() -> None:
    assert VARIANT not in verified
    assert self_test_hopper(VARIANT, torch.device("cpu")) == ""
    assert VARIANT in verified
    assert VARIANT._replace(dim=64) not in verified


def test_a_model_with_sinks_is_verified_with_them(kernels: SimpleNamespace) -> None:
    given: list[bool] = []
    variant, plain = VARIANT._replace(sinks=True), checked.prefill

    def prefill(*arguments: object, **options: object) -> None:
        extras = options["extras"]
        assert isinstance(extras, Extras)
        given.append(extras.sinks is not None)
        plain(*arguments, **options)  # type: ignore[arg-type]

    kernels.monkeypatch.setattr(checked, "prefill", prefill)
    assert self_test_hopper(variant, torch.device("cpu")) == ""
    assert given
    assert all(given)
    assert variant in verified
    assert VARIANT not in verified


def nothing_written(out: Tensor, at: Columns) -> None:
    out[-1] = torch.nan


def one_request_is_wrong(out: Tensor, at: Columns) -> None:
    out[20:22] *= 1.05


def raises(out: Tensor, at: Columns) -> None:
    raise RuntimeError("no such instruction\nmore")


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (nothing_written, "nan of the norm"),
        (one_request_is_wrong, "0.05 of the norm"),
        (raises, "RuntimeError: no such instruction"),
    ],
)
def test_what_differs_is_not(kernels: SimpleNamespace, breaks: Broken, said: str) -> None:
    assert self_test_hopper(VARIANT, torch.device("cpu")) == ""
    kernels.breaks = breaks
    assert said in self_test_hopper(VARIANT, torch.device("cpu"))
    assert VARIANT not in verified


def test_compiling_verifies_nothing(kernels: SimpleNamespace) -> None:
    kernels.breaks = nothing_written
    assert self_test_hopper(VARIANT, torch.device("cpu"), launched=False) == ""
    assert VARIANT not in verified


@pytest.mark.parametrize(
    ("num_pairs", "known", "chosen"),
    [(None, True, False), (10**6, True, False), (10**7, True, True), (10**7, False, False)],
)
def test_it_is_chosen_by_what_prompts_see(
    monkeypatch: pytest.MonkeyPatch, num_pairs: int | None, known: bool, chosen: bool
) -> None:
    """Where nothing is known of the prompts, as in a graph, by what is usual for so many tokens."""
    ran = []
    query, keys, values, at = make([(40, 33)], 4, 2, 64, torch.float32)
    qkv, out = step_of(keys, values, at, 4), torch.zeros_like(query)
    monkeypatch.setattr(checked, "hopper_from", lambda dim, window: 6 * 10**6)
    monkeypatch.setattr(hopper, "prefill", lambda *_, **options: ran.append(sorted(options)))
    verified.update({tiles.variant_of(query, keys, PLAIN)} if known else ())
    checked.prefill(query, keys, values, at, 0.125, out, qkv=qkv, num_pairs=num_pairs)
    assert ran == ([["fewest", "qkv"]] if chosen else [])
    assert out.any() == (not chosen)


# --- what few models' queries see, beside plain torch ---

SEEN = Variant(4, 2, 32, 16, WIDE, windowed=False, capped=False)
SLOPES = (0.5, 0.25, 0.125, 0.0625)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(self_test, "REQUESTS", ((30, 20), (37, 2), (0, 9), (63, 1)))
        monkeypatch.setattr(self_test, "SPLITS", (4,))
        monkeypatch.setattr(self_test, "CHUNKS", (32,))


@pytest.mark.usefixtures("small")
def test_chunks_and_slopes_are_right() -> None:
    assert self_test_chunks(SEEN, DEVICE) == ""
    assert self_test_slopes(SEEN, SLOPES, DEVICE) == ""
    assert self_test_heads(SEEN._replace(dim=512, kv_heads=4), DEVICE) == ""


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_a_kernel_that_sees_more_is_not_used(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = {"prefill": checked, "decode": decodes}[kernel]
    right = getattr(module, kernel)

    def sees_all(*given: object, **named: object) -> None:
        given = tuple(PLAIN if isinstance(one, Extras) else one for one in given)
        right(*given, **{name: PLAIN if name == "extras" else one for name, one in named.items()})

    monkeypatch.setattr(module, kernel, sees_all)
    assert self_test_chunks(SEEN, DEVICE)
    assert self_test_slopes(SEEN, SLOPES, DEVICE)


@pytest.mark.usefixtures("small")
def test_a_kernel_that_cannot_be_compiled_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no such instruction\nmore")

    monkeypatch.setattr(decodes, "decode", fails)
    assert self_test_chunks(SEEN, DEVICE) == "RuntimeError: no such instruction"


# --- caches of 8-bit floats ---


@needs_fp8
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_kernels_that_keep_8_bits_are_right(kind: torch.dtype) -> None:
    assert self_test_cache(CacheShape(4, 2, 32, 16, kind), WIDE, DEVICE) == ""


@needs_fp8
def test_what_writes_or_reads_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = CacheShape(2, 1, 16, 16, torch.float8_e5m2)
    with monkeypatch.context() as patch:
        patch.setattr(checked, "prefill", lambda *_, **__: None)
        assert "attention over a cache of torch.float8_e5m2 is" in self_test_cache(shape, WIDE, DEVICE)
    right = rope.rope_cache

    def unscaled(*arguments: Any) -> torch.Tensor:
        without_scales = arguments[:-2]
        return right(*without_scales)

    monkeypatch.setattr(rope, "rope_cache", unscaled)
    assert "what is written to a cache of torch.float8_e5m2 is not" in self_test_cache(shape, WIDE, DEVICE)
