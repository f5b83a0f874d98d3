"""The tuner of a worker's start: for products that no table of this GPU has, it uses what earlier starts have found, and measures more
within a bounded time, before anything is captured.

A CUDA graph holds the kernels that it was captured with, so nothing is swapped while serving: what there was no time for is measured
at the next start. Of tensor-parallel ranks the first measures, and all take its choices, since what they compute alike must be equal.
Called by engine/triton_kit.py.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch
import triton
from triton.runtime.errors import TritonError

from meshlm.kernels import tables
from meshlm.kernels.gemv import kernel as gemv
from meshlm.kernels.tables import Table
from meshlm.kernels.tuning import core, steps
from meshlm.kernels.tuning.core import Bench, Key
from meshlm.kernels.tuning.steps import Choice
from meshlm.kernels.tuning.store import Store
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.parts import joined
from meshlm.workers.distributed.communicator import Communicator
from meshlm.workers.distributed.shard import Shard

QUICK_S = 8.0  # before the worker is ready
FULL_S = 420.0  # for so long other ranks wait for the first without giving up
STEPS_S = 90.0  # of whole steps, after that
STEP_PASSES = 2
# kernels that no operation is named after
BESIDE = "moe_align", "moe_few", "moe_gemv", "moe_sum", "norm", "packed_gemm", "silu_mul"
ONE_ROW, STEPS = "gemv", (0, 0, False)  # the key of a note that whole steps are being measured
Entries = list[tuple[str, Table]]
Report = Callable[[str, int, int, str], None]  # phase, done, total, unit
TimedSteps = Callable[[list[Choice], Callable[[Choice], None]], list[float]]
"""Microseconds of a step with each choice, which is in use once the function that it gets was called with it."""
_log = structlog.get_logger()


class Ranks(NamedTuple):
    """The tensor-parallel ranks that must choose alike, and in what they can say so."""

    shard: Shard
    comm: Communicator
    device: torch.device
    dtype: torch.dtype
    width: int

    @property
    def first(self) -> bool:
        return self.shard.tp_rank == 0

    def shared(self, found: Entries) -> Entries:
        """The first rank's entries, on all. As bytes in sums to which the others add nothing; 16-bit floats hold 0 to 256 exactly."""
        if self.shard.tp_size == 1:
            return found
        data = json.dumps(found if self.first else []).encode()
        size = self._sum(list(len(data).to_bytes(8)) if self.first else [0] * 8)
        text = bytearray()
        length = int.from_bytes(bytes(size))
        for begin in range(0, length, self.width):
            line = list(data[begin : begin + self.width]) if self.first else []
            text += bytes(self._sum(line + [0] * (self.width - len(line))))
        return [(op, entry) for op, entry in json.loads(bytes(text[:length]))]

    def _sum(self, values: list[int]) -> list[int]:
        column = torch.tensor(values, dtype=self.dtype, device=self.device)
        return [int(value) for value in self.comm.all_reduce(column).tolist()]


class Tuner:
    """The tuner of one engine. `clock` gives seconds."""

    def __init__(
        self, mode: str, store: Store | None, ranks: Ranks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """mode: --tune. store: None where nothing can be kept, or another rank keeps it."""
        self._mode, self._store, self._ranks, self._clock = mode, store, ranks, clock

    def use_kept(self) -> None:
        tables.forget(all_of_it=True)
        if self._mode != "off":
            tables.add(self._ranks.shared(self._store.load() if self._store else []))

    def measure(self, bench: Bench, report: Report) -> bool:
        """Measures what is used since, if there is time for it. Whether anything was found: the same on all ranks.

        They all take part even if they measure nothing: one that was started again has another mode than the first."""
        if self._mode == "off":
            return False
        found: Entries = []
        if self._mode in ("quick", "full") and self._ranks.first and self._store is not None:
            self._measure(bench, found, self._store, report)
        found = self._ranks.shared(found)
        tables.add(found)
        return bool(found)

    def _measure(self, bench: Bench, found: Entries, store: Store, report: Report) -> None:
        full = self._mode == "full"
        ended = store.ended()
        wanted = [each for each in tables.unmeasured() if each not in ended]
        begin, bound_s = self._clock(), FULL_S if full else QUICK_S

        def known(op: str, key: Key) -> Table | None:
            entry = tables.added(op, key)
            return entry if entry is None or entry.get("full") or not full else None

        def keep(op: str, entry: Table) -> None:
            entry = {**entry, "full": True} if full else entry
            found.append((op, entry))
            store.keep(op, entry)
            report("tuning", len(found), len(wanted), "")
            tables.add([(op, entry)])  # the sizes of the next operation are measured beside this choice

        def time_left() -> float:
            return begin + bound_s - self._clock()

        with self._may_end_early():
            outcome = core.tune(wanted, bench, known, keep, time_left, store.attempt)
            if found:
                took_s = round(self._clock() - begin, 1)
                left = f"{outcome.left} are left for the next start" if outcome.left else ""
                _log.info("kernels tuned", shapes=len(found), seconds=took_s, kept_in=str(store.folder), left=left)

    @contextmanager
    def _may_end_early(self) -> Iterator[None]:
        """Logs what goes wrong inside, and products keep what they have. Raises if the GPU itself has failed."""
        try:
            yield
        except torch.OutOfMemoryError:
            _log.warning("no memory to tune in: products keep the kernels that they have")
        except OSError as error:
            _log.warning("nothing is tuned, since nothing can be kept", reason=str(error))
        # of a library, a compiler, a driver
        except (RuntimeError, TritonError, ValueError, TypeError, AssertionError) as error:
            if self._ranks.device.type == "cuda":
                torch.cuda.synchronize()  # raises if the GPU itself has failed: the next incarnation measures nothing
            _log.warning("tuning has ended early", reason=next(iter(str(error).splitlines()), ""))

    def measure_steps(self, timed: TimedSteps) -> bool:
        """One row's tiles by whole decode steps (--tune full), of the sizes that no table of the tree has and that have a tile. Whether
        others than before were chosen. Not of tensor-parallel ranks, which would have to launch every step together."""
        if self._mode != "full" or self._store is None or self._ranks.shard.tp_size > 1:
            return False
        store, begin = self._store, self._clock()
        wanted = [key for op, key in tables.unmeasured() if op == ONE_ROW]
        start = {key: gemv.shape_of(*key) for key in wanted if (tables.added(ONE_ROW, key) or {"rows": [1]})["rows"]}
        if not start or (ONE_ROW, STEPS) in store.ended():
            return False
        chosen = start
        with self._may_end_early():
            with store.attempt(ONE_ROW, STEPS):
                chosen = steps.descend(
                    start, lambda choices: timed(choices, _use), passes=STEP_PASSES,
                    is_over=lambda: self._clock() - begin >= STEPS_S,
                )  # fmt: skip
            found = _entries({key: tile for key, tile in chosen.items() if tile != start[key]})
            for op, entry in found:
                store.keep(op, entry)
            took_s = round(self._clock() - begin, 1)
            _log.info("tiles of one row by whole steps", shapes=len(found), seconds=took_s, kept_in=str(store.folder))
        _use(chosen)
        return chosen != start


def _entries(choice: Choice) -> Entries:
    return [(ONE_ROW, {**core.entry_of(ONE_ROW, key, {1: tile}), "full": True}) for key, tile in choice.items()]


def _use(choice: Choice) -> None:
    tables.add(_entries(choice))


def store_of(config: MeshConfig) -> Store | None:
    """Where this GPU's results are kept: --tuning-dir, or a folder of the user's cache for these versions."""
    made_by = {**versions(), "gpu": tables.this_gpu()}
    folder = config.worker.tuning_dir
    try:
        path = Path(folder) if folder else default_folder(made_by)
    except RuntimeError as error:  # a user without a name, as in some containers
        _log.warning("nothing is tuned, since nothing can be kept", reason=str(error))
        return None
    return Store(path, made_by, lambda line: _log.warning(line))


def default_folder(made_by: dict[str, Any]) -> Path:
    """Tables of other versions keep their own folder: two installations do not overwrite each other's."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    name = f"torch-{made_by['torch']}-triton-{made_by['triton']}-{made_by['kernels']}"
    return Path(base) / "meshlm" / "tuning" / name


def versions() -> dict[str, str]:
    """The versions that times depend on. Our kernels': a digest of their code."""
    ops = [*core.OPERATIONS, *BESIDE]
    files = [file for op in sorted(ops) for file in sorted((tables.FOLDER / op).glob("*.py"))]
    code = joined(*(file.read_bytes() for file in files))
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "triton": triton.__version__,
        "kernels": hashlib.sha256(code).hexdigest()[:12],
    }
