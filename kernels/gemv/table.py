"""Makes this GPU's table of gemv's tiles, and up to which weight it beats cuBLAS, from what tuning/measure_tables.py has timed."""

from typing import Any

from meshlm.kernels import tables
from meshlm.kernels.attention.table import Times, best
from meshlm.kernels.bench import measured
from meshlm.kernels.gemv.op import OPS
from meshlm.kernels.op import Case

FEW, SOME, MANY = 1024, 4096, 8192
NAMES, PART_NAMES = ("outputs", "inputs", "gate", "norm"), ("ranks", "outputs", "inputs", "gate", "way")
CLASSES: list[dict[str, Any]] = [
    {"inputs_to": FEW, "gate": True},
    {"inputs_to": FEW},
    {"inputs_to": SOME, "gate": True},
    {"inputs_to": 2 * FEW},
    {"inputs_to": SOME, "outputs_to": SOME},
    {"inputs_to": SOME},
    {"inputs_to": MANY},
    {},
]
WAYS: list[dict[str, Any]] = [
    {"way": "sends", "inputs_to": FEW},
    {"way": "sends", "inputs_to": 2 * FEW},
    {"way": "sends", "inputs_to": SOME, "outputs_to": SOME},
    {"way": "sends", "inputs_to": SOME},
    {"way": "sends"},
    {"way": "receives", "gate": True},
    {"way": "receives"},
]


def tiles(
    times: Times, classes: list[dict[str, Any]] = CLASSES, names: tuple[str, ...] = NAMES
) -> list[dict[str, Any]]:
    """The best tile of each class of shapes by the geometric mean; a class that no shape is in falls through to the next.

    names: of a case's sizes."""
    entries, left = [], {case: dict(zip(names, case, strict=True)) for case in times}
    for where in classes:
        mine = [
            case
            for case, sizes in left.items()
            if sizes["outputs"] <= where.get("outputs_to", sizes["outputs"])
            and sizes["inputs"] <= where.get("inputs_to", sizes["inputs"])
            and all(sizes[name] == where[name] for name in ("gate", "way") if name in where)
        ]
        for case in mine:
            del left[case]
        if chosen := mine or ([] if where else list(times)):
            entries.append({**where, "tile": list(best(times, chosen)[0])})
    return entries


def most_bytes(wins: dict[int, bool]) -> int:
    """The largest weight for which gemv pays, by {bytes: gemv won}: half-way between the last win and the first loss after it."""
    won = max((size for size, did in wins.items() if did), default=0)
    lost = min((size for size, did in wins.items() if not did and size > won), default=2 * won)
    return (won + lost) // 2


def table(times: dict[str, Times], multiprocessors: int) -> dict[str, Any]:
    """The whole table, by the times of each record. What whole steps have chosen stays."""
    wins: dict[int, bool] = {}
    for case, found in times["gemv"].items():
        size = case[0] * case[1] * (2 if case[2] else 1) * 2
        wins[size] = wins.get(size, True) and min(found.values()) < by_cublas(case)
    chosen = tiles(times["gemv_of_a_part"], WAYS, PART_NAMES) + tiles(times["gemv"])
    return {"most_bytes": most_bytes(wins), "tiles": chosen, "in_steps": (tables.own("gemv") or {}).get("in_steps", [])}


def by_cublas(case: Case) -> float:
    """Microseconds of cuBLAS with what the kernel brings along."""
    return float(measured(OPS[0], case, tiles=False)["cublas_us"])
