"""What to say of a process that SIGBUS ended while it read its model's files: which of them is cut short. Called by lives.py.

The files are mapped. Their sizes are held against their headers before they are read, but one that is cut short later, while a part
of it is being read, ends its reader there and then, without a word.
"""

import signal
from pathlib import Path

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.ids import Identity, Role


def told(config: MeshConfig, identity: Identity, code: int) -> str:
    """For people; "" when this was another end."""
    which = _read_by(identity.role, config) if code == -signal.SIGBUS else ""
    return which and f"{identity}: {which} ended early, or was changed while it was read (signal {-code})"


def _read_by(role: Role, config: MeshConfig) -> str:
    """The file that processes of this role map; "" when they map none."""
    resolved = config.resolved
    if resolved is None:
        return ""
    if role is Role.DETOKENIZER and resolved.tokenizer_path.endswith(".gguf"):  # the vocabulary is in there too
        return f"the file {resolved.tokenizer_path}"
    if role is not Role.WORKER or resolved.load_format == "dummy":
        return ""
    path = Path(resolved.model_path)
    file = path if resolved.load_format == "gguf" else _cut_short(path)
    return f"the weights file {file}" if file is not None else f"a weights file in {path}"


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
