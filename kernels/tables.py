"""Constants that were measured, by GPU: kernels/<op>/tables/<gpu>.json, in the tree and in the wheel.

Written on that GPU by `python -P -m meshlm.kernels.tuning.measure_tables` and `tuning.commit`, read once per process by
<op>/kernel.py. A GPU without a table gets that of the same processor with other memory (an H100 SXM that of an H200), or else the
nearest one's, which the log says once. What no table of this processor has is remembered when it is asked for; the tuner of a worker's
start measures that and adds what it found (`add`), before anything is captured. Nothing is tuned while serving.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable
from functools import _lru_cache_wrapper, cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

T = TypeVar("T")
Table = dict[str, Any]
FOLDER = Path(__file__).parent
FALLBACK = "nvidia_h200"
# Of an entry, those of them that its operation tells apart.
KEYS = ("outputs", "inputs", "use", "gate", "experts", "topk", "hidden", "wide", "format")
_added: dict[str, dict[tuple[Any, ...], Table]] = {}  # by operation and key: entries that the tuner found
_used: dict[tuple[str, tuple[Any, ...]], None] = {}  # in the order in which they were used first
_remembered: list[Any] = []
_log = logging.getLogger("meshlm.kernels")


def name_of(gpu: str) -> str:
    """The file of a GPU that calls itself so: "NVIDIA H100 80GB HBM3" is nvidia_h100_80gb_hbm3."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


@cache
def read(op: str) -> Table:
    """The table of kernels/<op> for the current GPU. Without a GPU (interpreter, tests) the fallback's."""
    if not torch.cuda.is_available():
        return _load(FOLDER / op / "tables" / f"{FALLBACK}.json")
    if (table := own(op)) is not None:
        return table
    found, facts = _all(op), this_gpu()
    chosen = nearest({name: table["gpu"] for name, table in found.items()}, facts)
    if not is_alike(found[chosen]):
        _log.warning(
            "kernels/%s has no table for %s: it runs with %s's; see tuning/measure_tables.py", op, facts["name"], chosen
        )
    return found[chosen]


def own(op: str) -> Table | None:
    """The table of this very GPU, if there is one: what its tuners add to."""
    path = FOLDER / op / "tables" / f"{name_of(torch.cuda.get_device_name())}.json"
    return _load(path) if path.exists() else None


def alike(op: str) -> Table | None:
    """The tables of this processor, if there are any, this very GPU's first: for what means nothing on another."""
    found = [table for table in (own(op), *_all(op).values()) if table is not None and is_alike(table)]
    if not found:
        return None
    merged = dict(found[0])
    for name in ("products", "layers"):
        entries = {key_of(entry): entry for table in reversed(found) for entry in table.get(name, [])}
        merged.update({name: list(entries.values())} if name in merged else {})
    return merged


def _all(op: str) -> dict[str, Table]:
    return {path.stem: _load(path) for path in sorted((FOLDER / op / "tables").glob("*.json"))}


def remembered(function: Callable[..., T]) -> "_lru_cache_wrapper[T]":
    """functools.cache for what follows from tables: forgotten when something is added to them."""
    cached = cache(function)
    _remembered.append(cached)
    return cached


def products(op: str) -> dict[tuple[Any, ...], list[list[Any]]]:
    """The choices for products in the table of this processor, if there is one: by outputs, inputs and maybe use, by rows. What it
    lacks may have been added.

    A choice: for rows above so many, up to so many, and what."""
    table = alike(op) if torch.cuda.is_available() else None
    added = {key: entry["rows"] for key, entry in _added.get(op, {}).items()}
    return {**added, **by_key((table or {"products": []})["products"])}


def by_key(entries: Iterable[Table]) -> dict[tuple[Any, ...], list[list[Any]]]:
    """The choices of entries for products."""
    return {key_of(entry): entry["rows"] for entry in entries}


def key_of(entry: Table) -> tuple[Any, ...]:
    return tuple(entry[name] for name in KEYS if name in entry)


def note_use(op: str, key: tuple[Any, ...]) -> None:
    """Remembers that a model uses the choices of this key."""
    _used.setdefault((op, key))


def unmeasured() -> list[tuple[str, tuple[Any, ...]]]:
    """Operations and keys that a model uses, and that no table of this processor in the tree has."""
    gpu = torch.cuda.is_available()
    known = {op: _keys(alike(op) if gpu else None) for op in {op for op, _ in _used}}
    return [(op, key) for op, key in _used if key not in known[op]]


def _keys(table: Table | None) -> set[tuple[Any, ...]]:
    """Keys of a table in the tree; tiles that whole steps have chosen are of these very sizes too, and layers are of experts."""
    table = table or {}
    in_steps = [entry for entry in table.get("in_steps", []) if "way" not in entry]
    return {key_of(entry) for entry in [*table.get("products", []), *table.get("layers", []), *in_steps]}


def added(op: str, key: tuple[Any, ...]) -> Table | None:
    """The entry that the tuner found."""
    return _added.get(op, {}).get(key)


def all_added(op: str) -> dict[tuple[Any, ...], Table]:
    return _added.get(op, {})


def add(found: Iterable[tuple[str, Table]]) -> None:
    """Adds entries of products, by operation. Whoever has asked before asks again."""
    for op, entry in found:
        _added.setdefault(op, {})[key_of(entry)] = entry
    forget()


def forget(*, all_of_it: bool = False) -> None:
    """Has every question asked anew; all_of_it: without what was added, and as if nobody had asked."""
    if all_of_it:
        _added.clear()
    _used.clear()
    for cached in _remembered:
        cached.cache_clear()


def for_rows(choices: Iterable[tuple[int, int, T]], rows: int) -> T | None:
    """The choice for this number of rows."""
    return next((choice for over, to, choice in choices if over < rows <= to), None)


def is_alike(table: Table) -> bool:
    """Whether the table is of this GPU's processor: compute capability and multiprocessors. Without a GPU any is."""
    return not torch.cuda.is_available() or processor(table["gpu"]) == processor(this_gpu())


def is_kin(table: Table) -> bool:
    """Whether the table is of a GPU of this compute capability, with more or fewer multiprocessors. Without a GPU any is."""
    return not torch.cuda.is_available() or table["gpu"]["capability"] == this_gpu()["capability"]


def processor(gpu: dict[str, Any]) -> tuple[int, ...]:
    """The key that tells processors apart: compute capability and number of multiprocessors. An H100 SXM and an H200 have the same."""
    return (*gpu["capability"], gpu["multiprocessors"])


def nearest(known: dict[str, dict[str, Any]], gpu: dict[str, Any]) -> str:
    """The nearest table: of the same compute capability if there is one, then with the most similar number of multiprocessors."""

    def distance(name: str) -> tuple[bool, int, int, bool]:
        other = known[name]
        (major, minor), (their_major, their_minor) = gpu["capability"], other["capability"]
        far = 100 * abs(major - their_major) + abs(minor - their_minor)
        return far != 0, far, abs(gpu["multiprocessors"] - other["multiprocessors"]), name != FALLBACK

    return min(known, key=distance)


def this_gpu() -> dict[str, Any]:
    """The facts by which a table names its GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": torch.cuda.get_device_name(),
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
    }


def write(op: str, values: Table, folder: Path | None = None) -> Path:
    """Keep what was measured on this GPU."""
    gpu = this_gpu()
    path = (folder or FOLDER / op / "tables") / f"{name_of(gpu['name'])}.json"
    path.parent.mkdir(exist_ok=True)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    path.write_text(json.dumps({"gpu": gpu, **versions, **values}, indent=1) + "\n")
    return path


def _load(path: Path) -> Table:
    table: Table = json.loads(path.read_text("utf-8"))
    return table
