"""Connectors: where a worker finds KV pages beside its own memory and the mesh's holders, one by name.

They are a plug-in group, `meshlm.kv_connectors`. A connector's methods are called in a thread of its own, in the order of the
scheduler's messages, and never beside each other. What it raises is the failure of that call alone: the blocks are computed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy import uint8
from numpy.typing import NDArray

Page = NDArray[uint8]
"""One page's bytes on this worker, all layers side by side, uint8[page_bytes]; equal key and namespace, equal bytes."""


class Connector(Protocol):
    """`make(namespace, page_bytes, options)` is what an entry point names; options: kv_connector_extra_config.

    The namespace is of this worker's slices of pages: those of the other workers of its rank have another. A connector is closed and
    made anew where the weights may have become others, since the namespace is another one then. A call has 30 s."""

    def find(self, keys: Sequence[bytes], params: Mapping[str, Any]) -> Sequence[bool]:
        """Which keys' pages it can load. params: kv_transfer_params of the request, empty where it has none."""
        ...

    def load(self, keys: Sequence[bytes], pages: Sequence[Page], params: Mapping[str, Any]) -> Sequence[bool]:
        """Fill the pages, one for each entry of `keys` (a key stands as often as it has pages, in order). Which of them are filled."""
        ...

    def save(self, keys: Sequence[bytes], pages: Sequence[Page]) -> None:
        """Keep these pages' bytes; they are the connector's to read until it returns. Keys that it has already may come again."""
        ...

    def close(self) -> None:
        """The worker ends."""
        ...
