"""A body of multipart/form-data to its fields. Pure; HttpError says what is wrong with it. Called by routes.py, in a thread."""

from typing import Any

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.limits import MIN_PROMPT_BYTES
from meshlm.frontend.speech.audio_decoder import not_installed

MAX_PARTS = 64
MAX_VALUE_BYTES = MIN_PROMPT_BYTES  # of a field that is no file
FILE = "file"


class _Parts:
    """Collects what the parser finds: callbacks of python-multipart, which gets the body in one chunk."""

    def __init__(self) -> None:
        self.found: list[tuple[str, bytes]] = []
        self._header, self._headers = [b"", b""], dict[bytes, bytes]()
        self._name, self._size = "", 0
        self._data: list[bytes] = []
        self.is_whole = False

    def callbacks(self) -> Any:
        of_headers = ("header_field", "header_value", "header_end", "headers_finished")
        names = ("part_begin", *of_headers, "part_data", "part_end", "end")
        return {f"on_{name}": getattr(self, name) for name in names}

    def part_begin(self) -> None:
        if len(self.found) == MAX_PARTS:
            raise HttpError(400, f"the form has more than {MAX_PARTS} fields")
        self._headers, self._data, self._size = {}, [], 0

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]

    def header_end(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]

    def headers_finished(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name")
        if not name:
            raise HttpError(400, "a part of the form has no name in its Content-Disposition")
        self._name = name.decode("utf-8", "replace")

    def part_data(self, data: bytes, start: int, end: int) -> None:
        self._size += end - start
        if self._name != FILE and self._size > MAX_VALUE_BYTES:
            name = self._name[:40]
            raise HttpError(400, f"{name}: more than {MAX_VALUE_BYTES} bytes in one field", name)
        self._data.append(data[start:end])

    def part_end(self) -> None:
        self.found.append((self._name, b"".join(self._data)))
        self._data = []

    def end(self) -> None:
        self.is_whole = True


def read(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    """The names and values of all parts, in order."""
    try:
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser, parse_options_header
    except ImportError:
        raise not_installed("python-multipart") from None

    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        shown = content_type[:60] or "nothing"
        raise HttpError(
            400, f"Content-Type: send the form as multipart/form-data with a boundary, not as {shown!r}", "Content-Type"
        )
    parts = _Parts()
    try:
        parser = MultipartParser(boundary, parts.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise HttpError(400, f"the body is no valid multipart/form-data: {error}") from None
    if not parts.is_whole:
        raise HttpError(400, "the body is no valid multipart/form-data: its last boundary is missing")
    return parts.found


def fields_of(parts: list[tuple[str, bytes]], lists: tuple[str, ...]) -> dict[str, Any]:
    """Values by name: texts, lists of texts for `lists`, and the file's bytes. An empty text is as good as none."""
    found: dict[str, Any] = {}
    for raw_name, value in parts:
        name = raw_name.removesuffix("[]")
        if name == FILE:
            text: Any = value
        else:
            try:
                text = value.decode()
            except UnicodeDecodeError:
                raise HttpError(400, f"{name[:40]}: is not valid UTF-8", name[:40]) from None
            if not text:
                continue
        if name in lists or (raw_name != name and name != FILE):
            found.setdefault(name, []).append(text)
        elif name in found:
            raise HttpError(400, f"{name[:40]}: this field is given more than once", name[:40])
        else:
            found[name] = text
    return found
