"""Every record of a kernel: with odd sizes and each dtype it gives what its reference gives, as near as the dtype's rounding."""

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, ON_GPU, near

from meshlm.kernels.op import Case, Op, all_records, names

pytestmark = MARKS
RECORDS = [
    pytest.param(op, case, dtype, id=f"{op.name}-{nth}-{str(dtype)[6:]}")
    for _, op in all_records()
    for nth, case in enumerate(op.cases)
    for dtype in op.dtypes
    if dtype in DTYPES and (not op.needs or (ON_GPU and torch.cuda.get_device_capability()[0] == op.needs))
]


def tensors(outputs: object) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)  # type: ignore[call-overload]


@pytest.mark.parametrize(("op", "case", "dtype"), RECORDS)
def test_it_gives_what_the_reference_gives(op: Op, case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    launch = op.make(dtype, DEVICE, *case)
    expected = tensors(launch.expected())
    found = tensors(launch.run())
    assert len(found) == len(expected) > 0
    for nth, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if nth < op.exact:
            assert torch.equal(mine, theirs)
        else:
            near(mine, theirs, dtype, op.near)


def test_every_record_has_cases_and_its_bench_other_ones() -> None:
    assert len(names()) >= 10
    for name, op in all_records():
        assert bool(op.cases) != op.peers, name
        assert len(set(map(str, op.of_models))) == len(op.of_models), name


def test_the_reference_leaves_the_inputs_as_they_are() -> None:
    """Or a kernel would be compared with what the reference made of them."""
    for op in (op for _, op in all_records() if op.cases):
        launch = op.make(op.dtypes[0], DEVICE, *op.cases[0])
        first, again = tensors(launch.expected()), tensors(launch.expected())
        for one, other in zip(first, again, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
