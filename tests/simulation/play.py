"""Plays histories FIRST, FIRST + STEP, ... below END; prints the seed of each that goes wrong, and how many were played.

    python -P tests/simulation/play.py FIRST END STEP

A program of its own, so that test_histories.py can use two cores.
"""

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from history import violation
from scenario import make


def main() -> int:
    gc.freeze()
    gc.disable()  # each world is one big cycle; looking for it a thousand times costs a fifth of the time
    first, end, step = map(int, sys.argv[1:4])
    seeds = range(first, end, step)
    wrong = []
    for number, seed in enumerate(seeds):
        if violation(make(seed)):
            wrong.append(seed)
        if number % 20 == 0:
            gc.collect()
    print(len(seeds), *wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
