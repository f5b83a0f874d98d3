"""What to say of a process that SIGBUS ended while it read its model's files: which of them is cut short. Called by lives.py.

The files are mapped. Their sizes are held against their headers before they are read, but one that is cut short later, while a part
of it is being read, ends its reader there and then, without a word.
"""

import signal
from pathlib import Path

import msgspec

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.ids import Identity, Role

READERS = (Role.WORKER, Role.DETOKENIZER)  # a .gguf file has the vocabulary too


def told(config_file: Path, identity: Identity, code: int) -> str:
    """For people; "" when this was another end."""
    if code != -signal.SIGBUS or identity.role not in READERS:
        return ""
    try:
        resolved = msgspec.json.decode(config_file.read_bytes(), type=MeshConfig).resolved
    except (OSError, msgspec.MsgspecError):
        return ""
    if resolved is None:
        return ""
    path = Path(resolved.model_path)
    file = path if resolved.load_format == "gguf" else _cut_short(path)
    which = f"the weights file {file}" if file is not None else f"a weights file in {path}"
    return f"{identity}: {which} ended early, or was changed while it was read (signal {-code})"


def _cut_short(folder: Path) -> Path | None:
    """The first file that is smaller than its header says, if one still is."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                continue
        except (SafetensorError, OSError):
            return file
    return None
