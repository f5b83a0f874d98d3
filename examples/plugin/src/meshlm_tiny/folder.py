"""KV pages in a folder, a file for each key, which outlive the mesh:

    meshlm serve --kv-transfer-config '{"kv_connector": "tiny_folder", "kv_connector_extra_config": {"folder": "/var/kv"}}'

A file has the key's pages, one behind the other, and their sum. Nothing here bounds the folder; for that there is --kv-offloading-path.
"""

import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshlm.workers.kv.connectors import Page

SUM_BYTES = 4


class Folder:
    """See `Connector`. Pages of another model, or of another worker of the rank, have another namespace, and so another folder."""

    def __init__(self, namespace: bytes, page_bytes: int, options: Mapping[str, Any]) -> None:
        """OSError, KeyError."""
        self._folder, self._page_bytes = Path(options["folder"]) / namespace.hex(), page_bytes
        self._folder.mkdir(parents=True, exist_ok=True)

    def find(self, keys: Sequence[bytes], params: Mapping[str, Any]) -> Sequence[bool]:
        return [self._path(key).exists() for key in keys]

    def load(self, keys: Sequence[bytes], pages: Sequence[Page], params: Mapping[str, Any]) -> Sequence[bool]:
        filled: list[bool] = []
        for key, some in _by_key(keys, pages):
            content = self._content(key)
            is_right = len(content) == len(some) * self._page_bytes
            for nth, page in enumerate(some if is_right else ()):
                page[:] = memoryview(content)[nth * self._page_bytes :][: self._page_bytes]
            filled += [is_right] * len(some)
        return filled

    def save(self, keys: Sequence[bytes], pages: Sequence[Page]) -> None:
        for key, some in _by_key(keys, pages):
            if self._path(key).exists():
                continue
            content = b"".join(page.data for page in some)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(content + zlib.crc32(content).to_bytes(SUM_BYTES, "big"))
            os.replace(file.name, self._path(key))  # all of it is there, or nothing

    def close(self) -> None: ...

    def _path(self, key: bytes) -> Path:
        return self._folder / key.hex()

    def _content(self, key: bytes) -> bytes:
        """The key's pages; nothing where they are gone, or not what was written."""
        try:
            content = self._path(key).read_bytes()
        except FileNotFoundError:
            return b""
        content, told = content[:-SUM_BYTES], content[-SUM_BYTES:]
        return content if zlib.crc32(content).to_bytes(SUM_BYTES, "big") == told else b""


def _by_key(keys: Sequence[bytes], pages: Sequence[Page]) -> Iterator[tuple[bytes, Sequence[Page]]]:
    """The pages of each key, which stand side by side."""
    begin = 0
    for end in range(1, len(keys) + 1):
        if end == len(keys) or keys[end] != keys[begin]:
            yield keys[begin], pages[begin:end]
            begin = end
