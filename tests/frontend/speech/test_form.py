"""Bodies of multipart/form-data to fields."""

import sys

import httpx
import pytest

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.speech import parse as form


def encoded(data: dict[str, str | list[str]], file: bytes = b"") -> tuple[str, bytes]:
    """As a client sends it."""
    request = httpx.Request("POST", "http://localhost", data=data, files={"file": ("a.wav", file)})
    return request.headers["content-type"], request.read()


def test_fields_and_the_file() -> None:
    file = b"\r\n--" + bytes(range(256)) * 500
    parts = form.read_form(*encoded({"model": "tiny", "prompt": "é\r\nb", "empty": "", "times[]": ["a", "b"]}, file))
    found = form.fields_of(parts, ("times",))
    assert found == {"model": "tiny", "prompt": "é\r\nb", "times": ["a", "b"], "file": file}
    assert form.fields_of([("times", b"a")], ("times",)) == {"times": ["a"]}


def refused(content_type: str, body: bytes) -> HttpError:
    with pytest.raises(HttpError) as caught:
        form.fields_of(form.read_form(content_type, body), ())
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=a"])
def test_other_types_are_refused(content_type: str) -> None:
    assert refused(content_type, b"--a--\r\n").param == "Content-Type"


@pytest.mark.parametrize(
    "body",
    [
        b"no form",
        b'--a\r\nContent-Disposition: form-data; name="x"\r\n\r\nbroken off',
        b"--a\r\nContent-Disposition: form-data\r\n\r\n1\r\n--a--\r\n",
        b"--a\r\nX: 1\r\n\r\n1\r\n--a--\r\n",
        b"--a\r\n" + b"X: " + b"y" * 20_000 + b"\r\n\r\n1\r\n--a--\r\n",
    ],
)
def test_broken_bodies_are_refused(body: bytes) -> None:
    refused("multipart/form-data; boundary=a", body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([("a", b"1"), ("a", b"2")], "a"),
        ([("file", b"1"), ("file", b"2")], "file"),
        ([("a", b"\xff")], "a"),
        ([("a", b"x" * (form.MAX_VALUE_BYTES + 1))], "a"),
        ([(f"a{place}", b"1") for place in range(form.MAX_PARTS + 1)], ""),
    ],
)
def test_fields_that_are_too_many_or_too_long(fields: list[tuple[str, bytes]], param: str) -> None:
    parts = [b'--a\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (n.encode(), v) for n, v in fields]
    assert refused("multipart/form-data; boundary=a", b"".join(parts) + b"--a--\r\n").param == param


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "python_multipart.exceptions", None)
    with pytest.raises(HttpError) as caught:
        form.read_form("multipart/form-data; boundary=a", b"")
    assert caught.value.status == 500
    assert "pip install 'av>=15' 'python-multipart>=0.0.20'" in caught.value.message
