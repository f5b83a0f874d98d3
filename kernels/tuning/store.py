"""What the tuner found, on disk: <folder>/<op>/tables/<gpu>.json, as in the tree, so that a folder can be committed or shared.

A table names its GPU and the versions that its times are of; another one's is named and not used. Several processes may write at
once: each writes a file of its own and puts it in the place of the last one, so none reads half a table. While a shape is measured a
note of it lies in the folder: where processes have ended in the midst of it (a kernel may break a GPU), nobody tries that shape again.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshlm.kernels.tables import Table, key_of, name_of
from meshlm.kernels.tuning.core import OPERATIONS, Key

FORMAT = 1
_NOTE = "attempt-"
TWICE = 2


class Store:
    """The tables of one GPU in one folder."""

    def __init__(self, folder: Path, made_by: dict[str, Any], say: Callable[[str], None]) -> None:
        """made_by: facts of the GPU, under "gpu", and versions."""
        self.folder, self._made_by, self._say = folder, {"format": FORMAT, **made_by}, say
        self._name = f"{name_of(made_by['gpu']['name'])}.json"

    def path(self, op: str) -> Path:
        return self.folder / op / "tables" / self._name

    def load(self) -> list[tuple[str, Table]]:
        """All entries that can be used, by operation."""
        return [(op, entry) for op in OPERATIONS for entry in self._read(op)]

    def ended(self) -> list[tuple[str, Key]]:
        """Shapes that nobody should measure again: they have broken a GPU, or twice a process has ended in their midst. Once may have
        been somebody's wish."""
        notes = list(self._notes())
        found = []
        for shape, times in Counter(shape for _, shape, _ in notes).items():
            if times < TWICE and not any(broken for _, other, broken in notes if other == shape):
                continue
            found.append(shape)
            at = next(note for note, other, _ in notes if other == shape)
            self._say(f"processes ended while they measured {shape[0]} {list(shape[1])}: not tried again ({at})")
        return found

    def _notes(self) -> Iterator[tuple[Path, tuple[str, Key], bool]]:
        """Those of processes that are gone: of which shape, and whether it has broken the GPU."""
        for note in sorted(self.folder.glob(f"{_NOTE}*.json")):
            pid = note.stem.removeprefix(_NOTE)
            if pid.isdecimal() and int(pid) != os.getpid() and _alive(int(pid)):
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                read = json.loads(note.read_text("utf-8"))
                if len(read["key"]) == len(OPERATIONS[read["op"]].key):
                    yield note, (read["op"], tuple(read["key"])), bool(read.get("broken"))

    def keep(self, op: str, entry: Table) -> None:
        """Adds an entry, in the place of that of the same key. Raises OSError where nothing can be written."""
        entries = {key_of(each): each for each in self._read(op)}
        entries[key_of(entry)] = entry
        path = self.path(op)
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {**self._made_by, "products": [entries[key] for key in sorted(entries, key=str)]}
        mine = path.with_name(f".{self._name}.{os.getpid()}")
        mine.write_text(json.dumps(values, indent=1) + "\n")
        mine.replace(path)

    @contextmanager
    def attempt(self, op: str, key: Key) -> Iterator[None]:
        """A note in the folder for as long as it takes; it stays if the process does not come back, or has lost its GPU."""
        self.folder.mkdir(parents=True, exist_ok=True)
        note, said = self.folder / f"{_NOTE}{os.getpid()}.json", {"op": op, "key": key}
        note.write_text(json.dumps(said))
        broken = False
        try:
            yield
        except Exception as error:
            broken = "CUDA error" in str(error)  # this process can do nothing more with its GPU, and ends
            raise
        finally:
            if broken:
                note.write_text(json.dumps({**said, "broken": True}))
            else:
                note.unlink(missing_ok=True)
                for other, shape, _ in list(self._notes()):
                    if shape == (op, key):
                        other.unlink(missing_ok=True)  # it did not end this process

    def _read(self, op: str) -> list[Table]:
        path = self.path(op)
        try:
            table = json.loads(path.read_text("utf-8"))
            entries = _checked(op, table)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            self._say(f"{path} is not used, and made anew: {type(error).__name__}: {error}")
            return []
        others = [name for name, value in self._made_by.items() if table.get(name) != value]
        if others:
            shown = ", ".join(f"{name} {_shown(table.get(name))}, not {_shown(self._made_by[name])}" for name in others)
            self._say(f"{path} is not used, and made anew: it is of {shown}")
            return []
        return entries


def _checked(op: str, table: Any) -> list[Table]:
    """The entries of a table that was read. ValueError where it is not one."""
    if not isinstance(table, dict) or not isinstance(table.get("products"), list):
        raise ValueError("it holds no products")
    for entry in table["products"]:
        if not isinstance(entry, dict) or not {*OPERATIONS[op].key, "rows", "measured"} <= entry.keys():
            raise ValueError("an entry lacks its sizes or choices")
        for choice in entry["rows"]:
            if not (
                isinstance(choice, list) and len(choice) == 3 and _numbers(choice[:2]) and _is_config(op, choice[2])
            ):
                raise ValueError(f"{choice!r} is no choice")
        for choice in entry["measured"]:
            plain = isinstance(choice, list) and choice[1:] == [[]]
            if not (isinstance(choice, list) and len(choice) == 2 and _numbers(choice[:1])) or not (
                plain or _is_config(op, choice[1])
            ):
                raise ValueError(f"{choice!r} is no measured choice")
    entries: list[Table] = table["products"]
    return entries


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, int) for value in values)


def _is_config(op: str, values: Any) -> bool:
    return _numbers(values) and len(values) == OPERATIONS[op].num_config


def _shown(value: Any) -> str:
    return str(value["name"]) if isinstance(value, dict) and "name" in value else str(value)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
