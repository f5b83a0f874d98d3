"""A kernel of hopper.py is used when it gave what the checked kernel gives. Here both are plain torch, and one may be broken."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from paged import make, step_of
from torch import Tensor

from meshlm.kernels.attention import hopper, proof
from meshlm.kernels.attention import prefill as checked
from meshlm.kernels.attention.kernel import PLAIN, Columns, Extras
from meshlm.kernels.attention.proof import Variant, prove, proven
from meshlm.kernels.attention.reference import attention

VARIANT = Variant(4, 2, 32, 16, torch.float16, windowed=True, capped=False)
Broken = Callable[[Tensor, Columns], None]


@pytest.fixture(autouse=True)
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
    monkeypatch.setattr(proof, "_proven", set())
    monkeypatch.setattr(proof, "REQUESTS", ((30, 20), (37, 2), (0, 9), (70, 13)))
    monkeypatch.setattr(proof, "WINDOWS", (5, 20))
    return state


def test_what_gives_the_same_is_proven() -> None:
    assert not proven(VARIANT)
    assert prove(VARIANT, torch.device("cpu")) == ""
    assert proven(VARIANT)
    assert not proven(VARIANT._replace(dim=64))


def test_a_model_with_sinks_is_proven_with_them(kernels: SimpleNamespace) -> None:
    given: list[bool] = []
    variant, plain = VARIANT._replace(sinks=True), checked.prefill

    def prefill(*arguments: object, **options: object) -> None:
        extras = options["extras"]
        assert isinstance(extras, Extras)
        given.append(extras.sinks is not None)
        plain(*arguments, **options)  # type: ignore[arg-type]

    kernels.monkeypatch.setattr(checked, "prefill", prefill)
    assert prove(variant, torch.device("cpu")) == ""
    assert given
    assert all(given)
    assert proven(variant)
    assert not proven(VARIANT)


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
    assert prove(VARIANT, torch.device("cpu")) == ""
    kernels.breaks = breaks
    assert said in prove(VARIANT, torch.device("cpu"))
    assert not proven(VARIANT)


def test_compiling_proves_nothing(kernels: SimpleNamespace) -> None:
    kernels.breaks = nothing_written
    assert prove(VARIANT, torch.device("cpu"), launched=False) == ""
    assert not proven(VARIANT)


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
    monkeypatch.undo()
    monkeypatch.setattr(checked, "hopper_from", lambda dim, window: 6 * 10**6)
    monkeypatch.setattr(hopper, "prefill", lambda *_, **options: ran.append(sorted(options)))
    monkeypatch.setattr(proof, "_proven", {proof.variant_of(query, keys, PLAIN)} if known else set())
    checked.prefill(query, keys, values, at, 0.125, out, qkv=qkv, num_pairs=num_pairs)
    assert ran == ([["fewest", "qkv"]] if chosen else [])
    assert out.any() == (not chosen)
