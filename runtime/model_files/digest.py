"""A digest of a model's files by which another process tells whether they are still the same. No weight is read."""

import hashlib
from pathlib import Path

KINDS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
DESCRIPTIONS = ("config.json", "params.json")


def digest_of(source: str) -> str:
    """Of the names, lengths and times (in ns) of the files with weights and of the configuration in a folder; or of one file. OSError.

    A folder that several hosts read must show all of them the same times: a shared file system does, a copy may not."""
    path = Path(source)
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if _counts(one))
    if not files:
        raise FileNotFoundError(2, "there is no file with weights", source)
    told = hashlib.sha256()
    for file in files:
        status = file.stat()
        told.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return told.hexdigest()


def _counts(file: Path) -> bool:
    return file.suffix in KINDS or file.name in DESCRIPTIONS or file.name.endswith(".index.json")
