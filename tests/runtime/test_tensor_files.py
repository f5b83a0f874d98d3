"""Tensors that clients saved: read as torch reads them, and nothing in the file is run."""

import base64
import collections
import contextlib
import io
import os
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.wire.columns import ints
from meshlm.runtime.errors import RequestError
from meshlm.runtime.tensor_files import NotATensor, embeds_of, kept, load_dict

HIDDEN, VOCAB = 8, 100


def saved(value: Any, **options: Any) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return base64.b64encode(buffer.getvalue()).decode()


def refusal(given: str) -> str:
    with pytest.raises(RequestError) as raised:
        embeds_of(given, HIDDEN, VOCAB, "prompt_embeds")
    assert raised.value.param == "prompt_embeds"
    return raised.value.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_numbers_are_torchs(dtype: torch.dtype) -> None:
    whole = torch.randn(9, HIDDEN).to(dtype)
    for tensor in (whole, whole[2:7], whole[None], torch.nn.Parameter(whole), whole[:1]):
        embeds = embeds_of(saved(tensor), HIDDEN, VOCAB, "prompt_embeds")
        rows = tensor.detach().reshape(-1, HIDDEN)
        assert embeds.dtype == str(dtype).removeprefix("torch.")
        found = torch.frombuffer(bytearray(embeds.data), dtype=dtype).view(-1, HIDDEN)
        assert torch.equal(found, rows)
        assert embeds.spans == ((0, len(rows)),)
        ids = ints(embeds.token_ids)
        assert len(ids) == len(rows)
        assert min(ids) >= 0
        assert max(ids) < VOCAB


def test_equal_vectors_have_equal_ids_and_a_cut_keeps_one_side() -> None:
    tensor = torch.randn(5, HIDDEN)
    whole = embeds_of(saved(tensor), HIDDEN, VOCAB, "prompt_embeds")
    for keep, side, rows in (
        (2, "right", tensor[:2]),
        (3, "left", tensor[2:]),
        (9, "left", tensor),
        (0, "left", tensor),
    ):
        assert kept(whole, keep, side) == embeds_of(saved(rows.clone()), HIDDEN, VOCAB, "prompt_embeds")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(2, HIDDEN + 1), "have 9 numbers"),
        (torch.zeros(HIDDEN), "shape is [8]"),
        (torch.zeros(2, 1, HIDDEN), "shape is [2, 1, 8]"),
        (torch.zeros(0, HIDDEN), "no vector"),
        (torch.zeros(2, HIDDEN, dtype=torch.int64), "torch.LongStorage"),
        (torch.zeros(2, HIDDEN, dtype=torch.float64), "torch.DoubleStorage"),
        (torch.zeros(HIDDEN, 2).T, "not contiguous"),
        (torch.eye(HIDDEN).to_sparse(), "_rebuild_sparse_tensor"),
        ({"a": torch.zeros(2, HIDDEN)}, "no plain tensor"),
        ([1, 2], "instruction"),
        (collections.OrderedDict(), "no plain tensor"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(value: Any, said: str) -> None:
    assert said in refusal(saved(value))


def test_the_older_form_and_other_texts_are_refused() -> None:
    assert "zip archive" in refusal(saved(torch.zeros(2, HIDDEN), _use_new_zipfile_serialization=False))
    assert "base64" in refusal("%%%")
    assert refusal("")
    assert refusal(base64.b64encode(b"PK\x03\x04").decode())


OLD_CALL = b"\x80\x02cposix\nsystem\nX\x05\x00\x00\x00touch\x85R."
NEW_CALL = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x05touch\x85R."


def archive(pickled: bytes, numbers: bytes = b"", compression: int = zipfile.ZIP_STORED) -> str:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as made:
        made.writestr("a/data.pkl", pickled)
        made.writestr("a/data/0", numbers)
    return base64.b64encode(buffer.getvalue()).decode()


def test_nothing_in_it_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: str) -> int:
        raise AssertionError(command)

    monkeypatch.setattr(os, "system", fail)
    assert "names posix.system" in refusal(archive(OLD_CALL))
    assert refusal(archive(NEW_CALL))
    assert refusal(archive(b"\x80\x02r\xff\xff\xff\x7f."))  # a memo of two thousand million places
    assert refusal(archive(b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f."))  # an array of as many bytes
    assert "too long" in refusal(archive(b"0" * (1 << 20)))
    bomb = archive(b"\x80\x02.", b"\0" * (1 << 24), zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal(bomb)


def bytes_of(value: Any, **options: Any) -> bytes:
    return base64.b64decode(saved(value, **options))


def test_tensors_by_name_are_torchs() -> None:
    whole = torch.randn(4, 6)
    tensors = {"a": whole, "b": whole[1:3], "c": whole[0].bfloat16(), "none": torch.zeros(0, 6)}
    module = torch.nn.Linear(6, 4)
    for value in (tensors, collections.OrderedDict(tensors), module.state_dict(), {"one": whole}, {}):
        found = load_dict(bytes_of(value))
        assert found.keys() == value.keys()
        for name, (dtype, shape, raw) in found.items():
            assert shape == value[name].shape
            expected = value[name].detach().contiguous().view(torch.uint8).numpy().tobytes() if len(raw) else b""
            assert (dtype, raw) == (str(value[name].dtype).removeprefix("torch."), expected)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (bytes_of(torch.zeros(2)), "no tensors by name"),
        (bytes_of({"a": 1}), "a is no plain tensor"),
        (bytes_of({1: torch.zeros(2)}), "no tensors by name"),
        (bytes_of({"a": {"b": torch.zeros(2)}}), "a is no plain tensor"),
        (bytes_of({"a": torch.zeros(3, 2).T}), "not contiguous"),
        (bytes_of({str(n): torch.ones(9).expand(9) for n in range(1)} | {"i": torch.zeros(2).long()}), "LongStorage"),
        (base64.b64decode(archive(OLD_CALL)), "names posix.system"),
        (base64.b64decode(archive(NEW_CALL)), "instruction"),
        (base64.b64decode(archive(b"\x80\x02)}b.")), "no plain tensor"),
        (base64.b64decode(archive(b"\x80\x02u.")), "no plain tensor"),
        (b"PK", "zip archive"),
    ],
)
def test_what_is_no_dictionary_of_tensors_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(NotATensor, match=said):
        load_dict(data)


def test_numbers_that_many_names_share_are_not_multiplied() -> None:
    big = torch.zeros(1 << 14)
    with pytest.raises(NotATensor, match="more numbers than the file"):
        load_dict(bytes_of({str(name): big for name in range(64)}))


@settings(max_examples=300)
@given(place=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_broken_file_is_refused_or_read(place: int, value: int) -> None:
    data = bytearray(base64.b64decode(GOOD))
    data[place % len(data)] = value
    with contextlib.suppress(RequestError):
        embeds = embeds_of(base64.b64encode(bytes(data)).decode(), HIDDEN, VOCAB, "prompt_embeds")
        assert len(embeds.data) in (2 * HIDDEN * 4, 2 * HIDDEN * 2)


GOOD = saved(torch.from_numpy(np.arange(2 * HIDDEN, dtype=np.float32).reshape(2, HIDDEN)))
