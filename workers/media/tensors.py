"""Reads the tensors of an item from its file in the host's shared memory, as the media process left them there."""

from math import prod

import numpy as np
import torch
from torch import Tensor

from meshlm.protocol.media import ITEM_BYTES, MediaItem

_DTYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "bool": torch.bool,
}
MAX_DIMS = 8


class MediaError(Exception):
    """Why an item cannot be encoded, for the client."""


def read_tensors(item: MediaItem) -> dict[str, Tensor]:
    """By name, on the host. MediaError where the file is gone, or does not have what the item says."""
    try:
        data = np.memmap(item.path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise MediaError(f"the {item.modality}'s tensors cannot be read ({type(error).__name__})") from None
    found = {}
    for name, dtype, shape, offset in ((one.name, one.dtype, one.shape, one.offset) for one in item.tensors):
        size = prod(shape) * ITEM_BYTES[dtype]
        if min(shape, default=1) < 0 or len(shape) > MAX_DIMS or offset < 0 or offset + size > len(data):
            raise MediaError(f"the {item.modality}'s tensor {name} {list(shape)} is not in its file")
        copied = torch.from_numpy(np.array(data[offset : offset + size]))
        found[name] = copied.view(_DTYPES[dtype]).view(shape)
    return found


def same_shape(tensors: dict[str, Tensor]) -> tuple[object, ...]:
    """Items for which this is equal are encoded at once: by shape, and where they are short, as grids and sizes are, by value."""
    return tuple(
        (name, value.dtype, value.shape, tuple(value.flatten().tolist()) if value.numel() <= MAX_DIMS else ())
        for name, value in sorted(tensors.items())
    )
