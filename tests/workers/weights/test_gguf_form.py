"""Which form the weights of a .gguf file have in memory, and what the line in the log says of it."""

import pytest

from meshlm.workers.weights.weights_plan import Form, WeightsPlan, form_of

GB = 1 << 30
H200 = WeightsPlan(device="cuda", compiled=False, available=130 * GB, request=4 * GB)


@pytest.mark.parametrize(
    ("changes", "decoded", "form", "why"),
    [
        ({}, 16 * GB, Form.DECODED, "decoded they take 16.00 GiB beside 32.50 GiB of KV cache, of 130.00 GiB"),
        ({}, 91 * GB, Form.DECODED, "of 130.00 GiB"),
        ({}, 92 * GB, Form.PACKED, "decoded they take 92.00 GiB"),  # a quarter for the cache, a twentieth for a step
        ({"request": 60 * GB}, 70 * GB, Form.PACKED, "beside 60.00 GiB of KV cache"),
        ({"cache": 2 * GB}, 115 * GB, Form.DECODED, "beside 2.00 GiB of KV cache"),
        ({"ranks": 2}, 16 * GB, Form.PACKED, "all ranks must do the same"),
        ({"ranks": 2, "wanted": "decoded"}, 16 * GB, Form.DECODED, "--gguf-weights decoded"),
        ({"wanted": "packed"}, 1 * GB, Form.PACKED, "--gguf-weights packed"),
        ({"wanted": "decoded"}, 500 * GB, Form.DECODED, "--gguf-weights decoded"),
        ({"device": "cpu", "compiled": True}, GB, Form.PANELS, "kernels compute with the file's codes"),
        ({"device": "cpu", "compiled": True, "wanted": "decoded"}, GB, Form.VALUES, "--gguf-weights decoded"),
        ({"device": "cpu"}, GB, Form.VALUES, "only float32 has kernels"),
        ({"device": "cpu", "wanted": "packed"}, GB, Form.PACKED, "--gguf-weights packed"),
        ({"device": "board"}, GB, Form.VALUES, "--device board has no products with packed weights"),
    ],
)
def test_the_form(changes: dict[str, object], decoded: int, form: Form, why: str) -> None:
    found, reason = form_of(H200._replace(**changes), decoded)  # type: ignore[arg-type]
    assert found is form
    assert why in reason
