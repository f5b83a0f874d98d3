"""The tensors of an adapter's folder, as the bytes of a safetensors file: read once, so that digest and values are of the same file.

adapter_model.bin, which older versions of peft wrote, is a pickle: of it plain tensors are read and nothing is run (tensor_files.py),
and from here on it is what a safetensors file with the same tensors is. No torch. Called by adapter_files.py.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from meshlm.protocol.prompt_embeds import EmbedsDType
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.checkpoint_files import TensorHeader, read_header
from meshlm.runtime.tensor_files import NotATensor, load_dict

TENSORS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
MAX_BYTES = 16 << 30  # of an adapter's tensors
EXPONENTS = {"F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""The types that are read: the numbers' bits, and those of the exponent."""
_NAMES: dict[EmbedsDType, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class AdapterTensors:
    """`data`: the bytes of a safetensors file. `headers`: by the tensors' names. `digest`: sha256 of the file that was read."""

    def __init__(self, folder: Path) -> None:
        """ModelFilesError names the file, and what is wrong with it."""
        self.file = next((folder / name for name in (TENSORS, PICKLED) if (folder / name).is_file()), folder / TENSORS)
        if not self.file.is_file():
            raise ModelFilesError(f"{folder}: {TENSORS} is not there")
        if self.file.name == TENSORS:
            self.headers = read_header(self.file)
            self.data = _read(self.file)
            self.digest = hashlib.sha256(self.data).digest()
        else:
            pickled = _read(self.file)
            self.headers, self.data = _plain(self.file, pickled)
            self.digest = hashlib.sha256(pickled).digest()

    def check_finite(self) -> None:
        """ModelFilesError names a tensor with a number that is infinite or none: every bit of its exponent is set."""
        import numpy as np  # a frontend without adapters does without

        begin = 8 + int.from_bytes(self.data[:8], "little")
        header = json.loads(self.data[8:begin])
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            kind, exponent = EXPONENTS[tensor["dtype"]]
            first, end = tensor["data_offsets"]
            bits = np.frombuffer(memoryview(self.data)[begin + first : begin + end], kind)
            if bool(((bits & exponent) == exponent).any()):
                raise ModelFilesError(f"{self.file}: tensor {name} has numbers that are not finite")


def _read(file: Path) -> bytes:
    try:
        if (size := file.stat().st_size) > MAX_BYTES:
            raise ModelFilesError(f"{file}: {size} bytes; at most {MAX_BYTES} are read")
        return file.read_bytes()
    except OSError as error:
        raise ModelFilesError(f"{file}: {error}") from None


def _plain(file: Path, pickled: bytes) -> tuple[dict[str, TensorHeader], bytes]:
    """The tensors of a file of torch.save's as a safetensors file."""
    try:
        tensors = load_dict(pickled)
    except NotATensor as error:
        raise ModelFilesError(f"{file}: {error}; plain tensors are read of a pickle, and nothing else") from None
    header, parts, end = dict[str, Any](), list[bytes](), 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (end, end + len(raw))}
        parts.append(raw)
        end += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    headers = {name: TensorHeader(_NAMES[dtype], shape) for name, (dtype, shape, _) in tensors.items()}
    return headers, b"".join((struct.pack("<Q", len(text)), text, *parts))
