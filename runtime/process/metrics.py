"""The folder where prometheus_client keeps the numbers that several processes share. Call before it is imported."""

import os
from pathlib import Path

# Of the library's files, by the kind of metric. It maps them: where the disk is full when a page is first written to, the kernel ends
# the process (SIGBUS). So their room is taken before: more than the metrics of a mesh with many ranks need.
RESERVED_BYTES = {"histogram": 128 << 10, "counter": 32 << 10, "gauge_mostrecent": 256 << 10}
BYTES_PER_ENGINE = {"histogram": 80 << 10, "counter": 4 << 10, "gauge_mostrecent": 20 << 10}


def prepare(run_dir: str, num_engines: int) -> str:
    """Point the library at `metrics/` in the run directory; "" or why that cannot be: this process then has numbers of its own only."""
    folder = Path(run_dir) / "metrics"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for kind in RESERVED_BYTES:
            _reserve(folder / f"{kind}_{os.getpid()}.db", reserved_bytes(kind, num_engines))
    except OSError as error:
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
        return f"{folder}: {error.strerror}"
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    return ""


def reserved_bytes(kind: str, num_engines: int) -> int:
    """The bytes to reserve for a frontend's own series, and for those of as many engines."""
    return RESERVED_BYTES[kind] + num_engines * BYTES_PER_ENGINE[kind]


def _reserve(path: Path, num_bytes: int) -> None:
    """A file of zeros, which the library takes for a new one; others read all that is called *.db at any time."""
    new = path.with_suffix(".new")
    try:
        with new.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
